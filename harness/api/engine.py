"""What an engine is given and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from harness.api.machine import LocalModel
from harness.api.spec import HardwareLimits, OffloadPolicy


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Temperature 0 is greedy. `ignore_eos` runs to `max_tokens`.

    Neither an end of sequence nor a stop string ends a request before its `min_tokens`, and a stop string that was
    complete before then does not count. `logprobs`: how many
    alternatives to report beside each token's own log-probability; None reports nothing.
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

    def stop_at(self, text: str, too_early: int = 0) -> int | None:
        """Where the first stop string in `text` begins, of those that end after its first `too_early` characters."""
        found = (text.find(stop, max(0, too_early - len(stop) + 1)) for stop in self.stop)
        return min((position for position in found if position >= 0), default=None)


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt as token ids; `arrival_s` counts from the start of the job (0 for offline work)."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    arrival_s: float = 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a generated token by the model itself, before temperature and any filter.

    `top`: the likeliest tokens and theirs, falling.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class GenerationResult:
    """The tokens of one request; times are seconds since `generate` began, one per token.

    `start_s` is when work on it began. `padding_tokens` counts pad positions computed on its behalf
    (masked, so never attended to): wasted work that throughput does not count. `logprobs`: one per token, or none.
    """

    id: str
    tokens: tuple[int, ...]
    start_s: float
    token_times_s: tuple[float, ...]
    prompt_tokens: int
    padding_tokens: int = 0
    finish_reason: Literal["length", "stop"] = "length"
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Score:
    """Log-likelihood (natural log, summed) of a continuation and whether greedy decoding would give it."""

    logprob: float
    is_greedy: bool


#: For a big job, where an engine knows no better.
_BATCH_POLICY = OffloadPolicy(gpu_batch_size=8)


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do and what its records need: the harness never branches on an engine's name."""

    phased: bool = True  # a block's prefill and decode do not overlap
    simulated: bool = False  # times come from a model of time, not from a clock
    device: bool = False  # runs on a device where limits.device_memory gives it one
    packages: tuple[str, ...] = ()  # distributions whose versions belong in the record
    batch_policy: OffloadPolicy = _BATCH_POLICY


@dataclass(frozen=True)
class Job:
    """What an engine may know of the work before it loads.

    `scratch` is an empty folder for offloaded tensors, removed afterwards; `cache` a folder that stays, for what
    is worth keeping until the next run. `max_sequence` is the most tokens (prompt and new ones) a sequence will
    have: memory for more need not be kept free. `mean_sequence` is how many it has on average over its life.
    `on_progress` may be told of work done and in all while a load takes long.
    """

    scratch: Path
    cache: Path
    max_sequence: int
    mean_sequence: int
    on_progress: Callable[[int, int], None] = lambda done, total: None


@dataclass(frozen=True)
class LoadReport:
    """What was really loaded: `policy` as realised, weights by tier in bytes (device, host, disk).

    `steady_blocks` is how many blocks of requests it takes until throughput no longer changes.
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
    """Something that ran, as a complete event of the Chrome trace format: `ts` and `dur` in microseconds.

    `cat` is the lane it is shown in and `tid` the lane's number.
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
    """An engine's own measurements: sums over all passes, and one pass in steady state in detail."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    events: tuple[TraceEvent, ...] = ()


@runtime_checkable
class Engine(Protocol):
    """One way to run a model. Built with its options as keywords; an unknown option raises TypeError.

    Methods raise InfeasibleError, UnsupportedError, HarnessError, MemoryError or OSError(ENOSPC) for what
    they name; anything else is recorded as `error`.
    """

    def capabilities(self) -> Capabilities:
        """Cheap and callable before `load`."""
        ...

    def load(self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job) -> LoadReport:
        """Makes the model ready within `limits`, or raises before it takes more."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Yields each result as it finishes, in any order."""
        ...

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Scores continuations given contexts, both as token ids; a context may be empty."""
        ...

    def trace(self) -> EngineTrace:
        """Metrics and events of the last `generate`; empty for an engine that keeps none."""
        ...

    def close(self) -> None:
        """Frees what load took. Idempotent."""
        ...


@runtime_checkable
class Workload(Protocol):
    """Where requests come from; the same seed gives the same request i however many are asked for."""

    def requests(self, vocab: int, count: int, seed: int) -> list[GenerationRequest]: ...
