"""The contracts between harness, engines, suites and reports: frozen data and protocols, standard library only.

Units are in the names or stated: `_s` seconds, `_bytes` bytes, rates per second. Token counts are real,
non-pad tokens. Everything here is immutable, comparable and serialisable by `to_json` / `from_json`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

SCHEMA_VERSION = 1

T = TypeVar("T")

Status = Literal[
    "ok",  # every check passed and the figures may be used
    "oom_device",  # the device's memory ran out (the engine's own exception)
    "oom_host",  # the host limit was hit (cgroup OOM event, monitor kill or MemoryError)
    "disk_full",
    "timeout",
    "infeasible",  # refused before loading: the budget cannot hold what the engine needs
    "unsupported",  # the engine cannot run this model, policy or host, and says why
    "interrupted",  # the user or a signal ended the harness; run again on resume
    "skipped",  # not attempted, e.g. because its batch search found nothing that survives
    "error",  # anything else; the reason holds the last line of the log
]
#: A repeat that ended so says something about the engine and is not repeated on resume.
FINAL_STATUSES: frozenset[str] = frozenset({"ok", "oom_device", "oom_host", "timeout", "infeasible", "unsupported"})

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
Schedule = Literal["row", "zigzag", "sweep"]
Tune = Literal["none", "max_batch"]

_FORBID = {"extra": "forbid"}  # read by pydantic where a suite file is validated; inert otherwise


class HarnessError(Exception):
    """An error the user can act on: its text is one line saying what, where and what to do."""


class InfeasibleError(HarnessError):
    """The budget cannot hold what the engine needs; the text carries the numbers."""


class UnsupportedError(HarnessError):
    """The engine cannot run this model, policy or host; the text says why."""


# --------------------------------------------------------------------------- what to run


@dataclass(frozen=True)
class ModelSpec:
    """A model by hub id (`facebook/opt-1.3b`), folder of safetensors, or `fake` for the fake engine.

    `weights: dummy` makes a seeded random checkpoint of that id's shape on first use. `dtype` is the
    dtype of the stored weights, `auto` the checkpoint's own.
    """

    __pydantic_config__ = _FORBID

    id: str
    weights: Literal["auto", "dummy"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    revision: str | None = None


@dataclass(frozen=True)
class WorkloadSpec:
    """Synthetic requests: `num_requests` prompts of `prompt_len` random tokens, `gen_len` new tokens each.

    `auto` runs whole blocks at the engine's own batch, as many as it needs for a steady state.
    """

    __pydantic_config__ = _FORBID

    kind: Literal["synthetic"] = "synthetic"
    prompt_len: int = 128
    gen_len: int = 16
    num_requests: int | Literal["auto"] = "auto"


@dataclass(frozen=True)
class OffloadPolicy:
    """Where tensors live and in which order they are computed; what an engine cannot honour it refuses.

    Fractions (wg wc wd weights, cg cc cd KV cache, hg hc hd activations; device, host, disk) sum to 1 in
    each triple; None leaves the placement to the engine. Bits of 16 mean the checkpoint's precision.
    Source: FlexGen (Sheng et al. 2023), section 4.3.
    """

    __pydantic_config__ = _FORBID

    gpu_batch_size: int = 1
    num_gpu_batches: int = 1
    schedule: Schedule = "row"
    weights: tuple[float, float, float] | None = None
    cache: tuple[float, float, float] | None = None
    activations: tuple[float, float, float] | None = None
    weight_bits: Literal[3, 4, 8, 16] = 16
    kv_bits: Literal[3, 4, 8, 16] = 16
    group_size: int = 64
    cpu_attention: bool = False
    value_sparsity: float = 1.0
    prefill_chunk: int | None = None
    threads: int | None = None
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    @property
    def block_size(self) -> int:
        """Sequences that share one pass over the weights."""
        return self.gpu_batch_size * self.num_gpu_batches

    def validate(self) -> None:
        """Raises HarnessError naming the first field that is out of range."""
        for name in ("gpu_batch_size", "num_gpu_batches", "group_size"):
            if getattr(self, name) < 1:
                raise HarnessError(f"policy.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("prefill_chunk", "threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise HarnessError(f"policy.{name} is {getattr(self, name)}; it must be at least 1, or left out")
        if not 0 < self.value_sparsity <= 1:
            raise HarnessError(f"policy.value_sparsity is {self.value_sparsity}; it must lie in (0, 1]")
        for name in ("weights", "cache", "activations"):
            triple = getattr(self, name)
            if triple is None:
                continue
            if any(not 0 <= f <= 1 for f in triple) or abs(sum(triple) - 1) > 1e-6:
                raise HarnessError(
                    f"policy.{name} is {list(triple)}; device, host and disk fractions must lie in [0, 1] and sum to 1"
                )

    def require_defaults_except(self, engine: str, *honoured: str) -> None:
        """Raises UnsupportedError for the first field that is set but not among `honoured`."""
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name not in honoured and value != f.default:
                raise UnsupportedError(
                    f"engine {engine} has no policy.{f.name} (got {value}); it honours {', '.join(honoured)}"
                )


@dataclass(frozen=True)
class HardwareLimits:
    """What the model's work may take, in bytes. None is no limit. Host memory counts the page cache."""

    __pydantic_config__ = _FORBID

    device_memory: int | None = None
    host_memory: int | None = None
    threads: int | None = None


@dataclass(frozen=True)
class HardwareRequirements:
    """What a machine must have, in bytes, before a suite is worth starting."""

    __pydantic_config__ = _FORBID

    device_memory: int = 0
    host_memory: int = 0
    disk_free: int = 0


@dataclass(frozen=True)
class RunSpec:
    """One cell: everything that decides what is measured, and the labels under which it is shown."""

    engine: str
    model: ModelSpec
    workload: WorkloadSpec
    policy: OffloadPolicy = OffloadPolicy()
    tune: Tune = "none"
    options: Mapping[str, Any] = field(default_factory=dict)
    limits: HardwareLimits = HardwareLimits()
    seed: int = 0
    warmup: int = 1
    timeout_s: float = 1800.0
    repeats: int = 3
    # labels: they change what is shown, never what is measured
    suite: str = ""
    name: str = ""
    expect: Status = "ok"
    reference: bool = False

    _LABELS = ("suite", "name", "expect", "reference", "repeats", "timeout_s")

    def fingerprint(self) -> str:
        """Stable hash (16 hex digits) of all that is measured; labels, repeats and the timeout are left out."""
        body = {k: v for k, v in to_json(self).items() if k not in self._LABELS}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SuiteSpec:
    """A suite file after expansion: its cells in order, and what the machine must have."""

    name: str
    description: str
    cells: tuple[RunSpec, ...]
    requires: HardwareRequirements = HardwareRequirements()
    machine_probe: bool = True


# --------------------------------------------------------------------------- models and machines


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a dense decoder that arithmetic needs: FLOPs, weight bytes and KV bytes.

    `params_per_layer` counts one decoder layer's matrices (elements of the linear layers);
    `params_total` everything in the checkpoint, tied tensors once.
    """

    family: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    params_per_layer: int
    params_total: int

    def flops(self, new_tokens: int, context: float, logits: int) -> float:
        """Floating-point operations to run `new_tokens` tokens attending to `context` earlier ones on average.

        `logits` of them reach the head. A multiply-add counts as two.
        """
        dense = 2 * new_tokens * self.params_per_layer * self.num_layers
        attention = 4 * new_tokens * context * self.num_heads * self.head_dim * self.num_layers
        return dense + attention + 2.0 * logits * self.hidden * self.vocab

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True)
class LocalModel:
    """A checkpoint made ready on this machine: what `ModelSpec` became."""

    path: str
    shape: ModelShape
    weight_bytes: int
    largest_layer_bytes: int
    dtype: Dtype
    digest: str


@dataclass(frozen=True)
class HardwareProfile:
    """Capacities and measured curves of one machine.

    `gemm_flops[dtype][rows]` is FLOP/s of x[rows, k] @ W[k, n] at the `gemm_shape` (k, n); missing means
    not measured. Bandwidths are bytes/s. Each curve carries every sample, the reader takes the median.
    """

    disk_read: tuple[float, ...] = ()
    gemm_shape: tuple[int, int] | None = None
    gemm_flops: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    measured_at: str = ""


# --------------------------------------------------------------------------- requests and results


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Temperature 0 is greedy. `ignore_eos` runs to `max_tokens`."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt as token ids; `arrival_s` counts from the start of the job (0 for offline work)."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    arrival_s: float = 0.0


@dataclass(frozen=True)
class GenerationResult:
    """The tokens of one request; times are seconds since `generate` began, one per token.

    `start_s` is when work on it began. `padding_tokens` counts pad positions computed on its behalf
    (masked, so never attended to): wasted work that throughput does not count.
    """

    id: str
    tokens: tuple[int, ...]
    start_s: float
    token_times_s: tuple[float, ...]
    prompt_tokens: int
    padding_tokens: int = 0
    finish_reason: Literal["length", "stop"] = "length"


@dataclass(frozen=True)
class Score:
    """Log-likelihood (natural log, summed) of a continuation and whether greedy decoding would give it."""

    logprob: float
    is_greedy: bool


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do: nobody branches on an engine's name."""

    description: str
    devices: tuple[str, ...] = ("cpu",)
    generates: bool = True
    scores: bool = False
    samples: bool = False
    offloads: bool = False
    compute_dtypes: tuple[Dtype, ...] = ()
    phased: bool = True  # a block's prefill and decode do not overlap
    steady_blocks: int = 1  # blocks of requests until throughput no longer changes
    simulated: bool = False  # times come from a model of time, not from a clock
    batched: bool = True  # honours gpu_batch_size, so a largest batch can be searched for
    packages: tuple[str, ...] = ()  # distributions whose versions belong in the record


@dataclass(frozen=True)
class LoadReport:
    """What was really loaded: `policy` as realised, weights by tier in bytes (device, host, disk)."""

    vocab: int
    max_context: int
    block_size: int
    policy: OffloadPolicy
    compute_dtype: str
    weights_by_tier: tuple[int, int, int]
    notes: tuple[str, ...] = ()


@runtime_checkable
class Engine(Protocol):
    """One way to run a model. Built with its options as keywords; an unknown option raises TypeError.

    Methods raise InfeasibleError, UnsupportedError, HarnessError, MemoryError or OSError(ENOSPC) for what
    they name; anything else is recorded as `error`.
    """

    def capabilities(self) -> Capabilities:
        """Cheap and callable before `load`."""
        ...

    def load(self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, scratch: Path) -> LoadReport:
        """Makes the model ready. `scratch` is an empty folder for offloaded tensors, removed afterwards."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Yields each result as it finishes, in any order."""
        ...

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Scores continuations given contexts, both as token ids; a context may be empty."""
        ...

    def close(self) -> None:
        """Frees what load took. Idempotent."""
        ...


@runtime_checkable
class Workload(Protocol):
    """Where requests come from; the same seed gives the same request i however many are asked for."""

    def requests(self, vocab: int, count: int, seed: int) -> list[GenerationRequest]: ...


# --------------------------------------------------------------------------- measuring and recording

Phase = Literal["startup", "load", "generate", "run"]


@dataclass(frozen=True)
class Measurement:
    """Raw samples of one quantity in one phase. An empty `samples` is `null`: no counter exists here."""

    name: str
    unit: str
    samples: tuple[float, ...]
    phase: Phase
    note: str = ""


@runtime_checkable
class Probe(Protocol):
    """Watches one phase as a context manager; `measurements` is read after the phase ended."""

    def __enter__(self) -> Probe: ...

    def __exit__(self, *exc: object) -> None: ...

    def measurements(self, phase: Phase) -> list[Measurement]: ...


@dataclass(frozen=True)
class RequestTrace:
    """One finished request in a record: counts, times, and a digest instead of the tokens."""

    id: str
    prompt_tokens: int
    generated_tokens: int
    padding_tokens: int
    start_s: float
    token_times_s: tuple[float, ...]
    finish_reason: str
    digest: str


@dataclass(frozen=True)
class MemoryLimit:
    """How the cell's memory was bounded: `limit = idle + budget`, all in bytes.

    `method` is cgroup-v1, cgroup-v2, monitor (anonymous memory only, sampled) or none.
    """

    method: str
    idle_bytes: int
    budget_bytes: int | None
    limit_bytes: int | None
    peak_bytes: int | None = None
    counts_page_cache: bool = False


@dataclass(frozen=True)
class Bound:
    """The best throughput this machine allowed for this cell's batch and dtype (generated tokens/s).

    `compute_s` and `disk_s` are the least times one block needs from each resource, at rates measured
    beside the run; `limited_by` names the longer one.
    """

    throughput_tok_s: float
    compute_s: float
    disk_s: float
    limited_by: Literal["compute", "disk"]


@dataclass(frozen=True)
class Trial:
    """One step of a batch search: what was tried and how it ended."""

    gpu_batch_size: int
    status: Status
    throughput_tok_s: float | None
    reason: str = ""


@dataclass(frozen=True)
class RunRecord:
    """One launch of one cell: raw samples, status, and all that is needed to judge or repeat it."""

    spec: RunSpec
    fingerprint: str
    repeat: int
    status: Status
    reason: str = ""
    started_at: str = ""
    wall_s: float = 0.0
    load: LoadReport | None = None
    requests: tuple[RequestTrace, ...] = ()
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    measurements: tuple[Measurement, ...] = ()
    memory: MemoryLimit | None = None
    bound: Bound | None = None
    machine: HardwareProfile | None = None
    model: LocalModel | None = None
    tuning: tuple[Trial, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    log: str = ""
    simulated: bool = False
    projected: bool = False
    schema_version: int = SCHEMA_VERSION

    #: Fields that hold times or what the operating system counted; all others repeat exactly for one seed.
    VOLATILE = ("started_at", "wall_s", "measurements", "memory", "machine", "bound", "provenance", "tuning")


@dataclass(frozen=True)
class LaunchRequest:
    """What a launcher needs for one launch: a cell with a settled policy, its model and its logs."""

    spec: RunSpec
    repeat: int
    model: LocalModel
    workdir: Path
    log: Path


class Launcher(Protocol):
    """Runs one cell in isolation. Never raises for what the workload did: that is the record's status."""

    def launch(self, request: LaunchRequest, on_event: EventSink) -> RunRecord: ...


class EventSink(Protocol):
    """Receives progress: phase is startup, load, warmup or generate; tokens done and expected so far."""

    def __call__(self, phase: str, done: int, total: int) -> None: ...


# --------------------------------------------------------------------------- JSON


def to_json(value: Any) -> Any:
    """Plain JSON data of a contract object: dataclasses become objects in field order, tuples lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value


def from_json(cls: type[T], data: Any) -> T:
    """The inverse of `to_json` for a contract class: absent fields take their defaults.

    Raises HarnessError for a value that does not fit, naming the class and field. Unknown keys are
    refused: a reader must not drop what it does not understand.
    """
    return _convert(cls, data, cls.__name__)


def _convert(hint: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(data, Mapping):
            raise HarnessError(f"{where}: expected an object, got {type(data).__name__}")
        hints = typing.get_type_hints(hint)
        known = {f.name for f in dataclasses.fields(hint)}
        if unknown := sorted(set(data) - known):
            raise HarnessError(f"{where}: unknown field {unknown[0]!r}")
        try:
            return hint(**{k: _convert(hints[k], v, f"{where}.{k}") for k, v in data.items()})  # type: ignore[operator]
        except TypeError as exc:
            raise HarnessError(f"{where}: {exc}") from exc
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        for arm in args:
            try:
                return _convert(arm, data, where)
            except HarnessError:
                continue
        raise HarnessError(f"{where}: {data!r} fits none of {', '.join(map(str, args))}")
    if origin is typing.Literal:
        if data in args and type(data) in {type(a) for a in args}:
            return data
        raise HarnessError(f"{where}: {data!r} is not one of {', '.join(map(str, args))}")
    if origin is tuple:
        if not isinstance(data, list | tuple):
            raise HarnessError(f"{where}: expected a list, got {type(data).__name__}")
        inner = [args[0]] * len(data) if args[-1] is Ellipsis else list(args)
        if len(inner) != len(data):
            raise HarnessError(f"{where}: expected {len(inner)} values, got {len(data)}")
        return tuple(_convert(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(zip(inner, data, strict=True)))
    if origin is Mapping:
        if not isinstance(data, Mapping):
            raise HarnessError(f"{where}: expected an object, got {type(data).__name__}")
        return {k: _convert(args[1], v, f"{where}.{k}") for k, v in data.items()}
    if hint is Any:
        return data
    if hint is float and isinstance(data, int | float) and not isinstance(data, bool):
        return float(data)
    if isinstance(hint, type) and isinstance(data, hint) and (hint is bool or not isinstance(data, bool)):
        return data
    if hint is type(None) and data is None:
        return None
    raise HarnessError(f"{where}: expected {getattr(hint, '__name__', hint)}, got {data!r}")
