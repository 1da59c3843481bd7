"""The contract of engines: the `Engine` protocol, its inputs and its results."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from harness.api.common import HarnessError, UnsupportedError
from harness.api.machine import LocalModel, ModelShape
from harness.api.spec import HardwareLimits, OffloadPolicy, RunSpec


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Temperature 0 is greedy. `ignore_eos` runs to `max_tokens`.

    Neither an end of sequence nor a stop string ends a request before `min_tokens`; a stop string that is complete
    before then does not count. `logprobs`: how many alternatives to report beside each token's log-probability; None
    reports nothing. `prompt_logprobs`: reports them of the prompt's tokens too.
    `json_schema`: the answer is JSON that follows this schema, itself in JSON.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False
    json_schema: str | None = None

    def stop_at(self, text: str, too_early: int = 0) -> int | None:
        """Where the first stop string in `text` begins; one that ends within the first `too_early` characters does not
        count. None if there is none."""
        positions = (text.find(stop, max(0, too_early - len(stop) + 1)) for stop in self.stop)
        return min((position for position in positions if position >= 0), default=None)

    def require_valid(self, where: str) -> None:
        """Raises HarnessError naming `where` and the first setting that is out of range."""
        for name, valid, allowed in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "from 0 to max_tokens"),
            ("temperature", 0 <= self.temperature < math.inf, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("seed", self.seed is None or 0 <= self.seed < 1 << 64, "from 0 to 2^64 - 1"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "0 or more"),
        ):
            if not valid:
                raise HarnessError(f"{where}: {name} is {getattr(self, name)}; it must be {allowed}")
        if self.prompt_logprobs and self.logprobs is None:
            raise HarnessError(f"{where}: prompt_logprobs needs logprobs")
        if self.json_schema is not None and (self.ignore_eos or self.min_tokens):
            raise HarnessError(f"{where}: a json_schema says when an answer ends: without ignore_eos and min_tokens")


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt as token ids; `arrival_s` counts from the start of the job (0 for offline work)."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    arrival_s: float = 0.0

    def require_valid(self, shape: ModelShape) -> None:
        """Raises HarnessError naming the request and why a model of this shape cannot run it."""
        where = f"request {self.id}"
        if not self.prompt:
            raise HarnessError(f"{where}: the prompt is empty")
        shape.require_ids(where, self.prompt)
        self.sampling.require_valid(where)
        if len(self.prompt) + self.sampling.max_tokens > shape.max_context:
            raise HarnessError(
                f"{where}: {len(self.prompt)} prompt + {self.sampling.max_tokens} new tokens exceed "
                f"the model's context of {shape.max_context}"
            )

    def refuse_settings(self, engine: str, *names: str) -> None:
        """Raises UnsupportedError where the request sets one of these sampling parameters, which `engine` lacks."""
        if any(getattr(self.sampling, name) != getattr(SamplingParams(), name) for name in names):
            raise UnsupportedError(f"request {self.id}: engine {engine} does not support {', '.join(names)}")


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a generated token under the model, before temperature and filters.

    `top`: the likeliest tokens with their log-probabilities, in descending order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class GenerationResult:
    """The tokens of one request. Times are seconds since `generate` began, one per token.

    `start_s` is when work on the request began. `padding_tokens` counts the masked pad positions computed for it:
    wasted work that throughput does not count. `cached_tokens`: of the prompt, those whose keys and values a cache had;
    None where the engine does not tell. `logprobs`: one per token, or empty. `prompt_logprobs`: one for each token of
    the prompt but the first, or empty. A request that was cancelled has the tokens that it got before.
    """

    id: str
    tokens: tuple[int, ...]
    start_s: float
    token_times_s: tuple[float, ...]
    prompt_tokens: int
    padding_tokens: int = 0
    finish_reason: Literal["length", "stop", "cancelled"] = "length"
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Score:
    """Log-likelihood (natural log, summed) of a continuation, and whether greedy decoding would produce it."""

    logprob: float
    is_greedy: bool


#: For a large job, if the engine suggests no policy.
_BATCH_POLICY = OffloadPolicy(gpu_batch_size=8)


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do and what its records need, so that the harness never branches on an engine's name."""

    phased: bool = True  # a block's prefill and decode do not overlap
    simulated: bool = False  # reports simulated times
    remote: bool = False  # a server's client: tells no token ids (-1), and `submit` may be called from any thread
    device: bool = False  # can run on a device, within limits.device_memory
    packages: tuple[str, ...] = ()  # distributions whose versions the record keeps
    batch_policy: OffloadPolicy = _BATCH_POLICY

    def require_device(self, spec: RunSpec) -> None:
        """Raises UnsupportedError if a cell limits device memory and its engine, of these capabilities, uses none."""
        if spec.limits.gpu and not self.device:
            raise UnsupportedError(f"limits.device_memory: engine {spec.engine} uses no device; limit host_memory")


@dataclass(frozen=True)
class Job:
    """What an engine may know of the work before it loads.

    `scratch` is an empty folder for offloaded tensors, removed afterwards; `cache` is a folder that persists between
    runs. `max_sequence` is the largest number of tokens (prompt and new) of any sequence: an engine need not reserve
    memory for more. `mean_sequence` is the mean number of a sequence's tokens over its life, `mean_new` that of the
    tokens it generates (None: it grows to `max_sequence`). A long load may report progress by `on_progress(done,
    total)`. `reproducible`: an answer must depend neither on what shares its passes nor on how fast anything was, where
    the engine can give that: an interrupted job is resumed with other company.
    """

    scratch: Path
    cache: Path
    max_sequence: int
    mean_sequence: int
    on_progress: Callable[[int, int], None] = lambda done, total: None
    reproducible: bool = False
    mean_new: int | None = None


@dataclass(frozen=True)
class LoadReport:
    """What an engine has loaded: `policy` as realised, weights in bytes by tier (device, host, disk).

    `steady_blocks` is the number of request blocks after which throughput no longer changes.
    """

    vocab: int
    max_context: int
    block_size: int
    policy: OffloadPolicy
    compute_dtype: str
    weights_by_tier: tuple[int, int, int]
    notes: tuple[str, ...] = ()
    steady_blocks: int = 1


@dataclass(frozen=True)
class TraceEvent:
    """A complete event of the Chrome trace format; `ts` and `dur` in microseconds.

    `cat` names the lane that shows it, `tid` is the lane's number. Of an engine on several ranks, each has a lane
    besides, with what it does by `name` (compute, wait, send); `pid` is then the rank + 1, otherwise 0.
    """

    name: str
    cat: str
    ts: float
    dur: float
    tid: int = 0
    pid: int = 0
    ph: Literal["X"] = "X"


@dataclass(frozen=True)
class EngineTrace:
    """An engine's measurements: sums over all passes, and the events of one pass in steady state."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    events: tuple[TraceEvent, ...] = ()


@runtime_checkable
class Engine(Protocol):
    """A way to run models. Its constructor takes the options as keywords and raises TypeError for an unknown one.

    Methods raise InfeasibleError, UnsupportedError, another HarnessError, MemoryError or OSError(ENOSPC), which decide
    the status of the record; any other exception is recorded as `error`.
    """

    def capabilities(self) -> Capabilities:
        """What the engine can do. Cheap, and callable before `load`."""

    def load(self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job) -> LoadReport:
        """Loads the model within `limits`, or raises before it exceeds them."""

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Yields each result as it finishes, in any order."""

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Scores continuations given contexts, both as token ids; a context may be empty."""

    def trace(self) -> EngineTrace:
        """Metrics and events of the last `generate`; empty, as here, for an engine that keeps none."""
        return EngineTrace()

    def close(self) -> None:
        """Frees all that `load` took. Idempotent."""


@runtime_checkable
class Workload(Protocol):
    """A source of requests. Request i depends on the seed only, not on `count`."""

    def requests(self, vocab: int, count: int, seed: int) -> list[GenerationRequest]: ...
