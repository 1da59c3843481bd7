"""What a launch leaves behind: its record, the measurements in it, and its line in records.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from harness.api.common import SCHEMA_VERSION, HarnessError, Status
from harness.api.engine import LoadReport, TraceEvent
from harness.api.machine import LocalModel, MachineRates
from harness.api.serial import from_json
from harness.api.serving import ServedRate
from harness.api.spec import RunSpec

Phase = Literal["load", "generate"]
#: A launch is disturbed if others took more than this share of the CPU time used during generation. What works for a
#: launch, such as kernel threads that reclaim its pages, counts as others: up to 5.3 % in committed quiet runs.
DISTURBED = 0.06
#: And more than these seconds: the clocks of a phase tick 100 times a second on each core.
_DISTURBED_S = 0.1


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

    `method` is cgroup-v1, cgroup-v2, monitor (anonymous and shared memory, sampled) or none.
    """

    method: str
    idle_bytes: int
    budget_bytes: int | None
    limit_bytes: int | None
    peak_bytes: int | None = None
    counts_page_cache: bool = False


@dataclass(frozen=True)
class Bound:
    """The best throughput this machine allowed (generated tokens/s): for a batch and dtype, or for a whole job.

    `compute_s`, `disk_s` and, with a device, `link_s` (copies to it) are the least times one block needs from each
    resource, at rates measured beside the run; `limited_by` names the longest one. A job's block is its best one.
    """

    throughput_tok_s: float
    compute_s: float
    disk_s: float
    limited_by: Literal["compute", "disk", "link"]
    link_s: float = 0.0

    @property
    def longest_s(self) -> float:
        """The time of the resource that limits."""
        return max(self.compute_s, self.disk_s, self.link_s)


@dataclass(frozen=True)
class Trial:
    """One launch of a search, or a measured launch of what it chose: the batch and the candidates' `settings` beside
    the cell's own, and how it ended."""

    gpu_batch_size: int
    status: Status
    throughput_tok_s: float | None
    reason: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Forecast:
    """What the performance model says of a launch, from the rates of a `hardware` profile.

    `metrics` have the names and meanings of the launch's own.
    """

    hardware: str
    throughput_tok_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Accuracy:
    """What a model's answers to an accuracy task are worth.

    `figures`: means with their `_stderr`, and what else the task says; `outcomes`: of each example, in order, what a
    mean is of (of a perplexity: log-likelihoods, in nats), for comparisons in pairs; `weights`: what each counts for,
    where not all count alike. `shortened`: prompts that were too long and lost worked examples; `truncated`:
    those that lost their beginning. `files`: SHA-256 of what was read. `protocol`: what a reader must know to compare.
    """

    task: str
    protocol: str
    examples: int
    figures: Mapping[str, float]
    outcomes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    weights: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    shortened: int = 0
    truncated: int = 0
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """One launch of one cell: raw samples, status, and all that is needed to judge or repeat it.

    `bound` is that of the batch that the engine loaded, `job_bound` that of all requests in the best batch of any size.
    `served`: of an online workload instead of `requests`. `notes`: what a reader of the figures must know.
    `machine` was measured before the launch, `machine_after` after it. `settings`: the candidates that a search chose,
    where they differ from the spec.
    """

    spec: RunSpec
    fingerprint: str
    repeat: int
    status: Status
    reason: str = ""
    started_at: str = ""
    wall_s: float = 0.0
    load: LoadReport | None = None
    requests: tuple[RequestTrace, ...] = ()
    served: tuple[ServedRate, ...] = ()
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    memory: MemoryLimit | None = None
    bound: Bound | None = None
    job_bound: Bound | None = None
    predicted: Forecast | None = None
    accuracy: Accuracy | None = None
    machine: MachineRates | None = None
    machine_after: MachineRates | None = None
    model: LocalModel | None = None
    tuning: tuple[Trial, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    trace: tuple[TraceEvent, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    log: str = ""
    simulated: bool = False
    schema_version: int = SCHEMA_VERSION

    def total(self, name: str, phase: Phase) -> float | None:
        """The sum of a counter's samples in a phase; None where the record lacks the counter."""
        return _total(self.measurements, name, phase)

    @property
    def others_cpu(self) -> float:
        """As `others_cpu` has it of these measurements. Records of before 2026-11-26 count the kernel's threads as
        others."""
        return others_cpu(self.measurements)

    @property
    def disturbed(self) -> bool:
        """Whether others took so much CPU time that its speed says little, however fast or slow it was."""
        return self.others_cpu > DISTURBED


def _total(measurements: Sequence[Measurement], name: str, phase: Phase) -> float | None:
    samples = [v for m in measurements if (m.name, m.phase) == (name, phase) for v in m.samples]
    return sum(samples) if samples else None


def others_cpu(measurements: Sequence[Measurement]) -> float:
    """The share of the CPU time used during generation that went to other processes and the hypervisor; 0 where they
    took next to nothing or it was not measured. The kernel's threads are not others: they serve this launch's reads and
    writes too."""
    own, other = (_total(measurements, f"cpu_{name}_s", "generate") for name in ("own", "other"))
    if own is None or other is None:
        return 0.0
    taken = other + (_total(measurements, "cpu_steal_s", "generate") or 0.0)
    used = own + taken + (_total(measurements, "cpu_kernel_s", "generate") or 0.0)
    return taken / used if taken > _DISTURBED_S else 0.0


def parse_record(line: bytes, where: str) -> RunRecord:
    """The record on a line. Raises HarnessError, beginning with `where`, for damage or a newer schema."""
    try:
        data = json.loads(line.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise HarnessError(f"{where}: not JSON ({exc}); repair or remove that line") from exc
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is not int or version < 1:  # JSON's true is no number
        raise HarnessError(f"{where}: not a record, as it has no schema_version; repair or remove that line")
    if version > SCHEMA_VERSION:
        raise HarnessError(
            f"{where}: schema_version {version} is newer than {SCHEMA_VERSION}, the newest known here; update it"
        )
    if version == 1 and isinstance(data.get("model"), dict):
        data["model"].pop("largest_layer_bytes", None)  # which nothing ever read
    if version < 3:
        data.pop("projected", None)  # which nothing ever set
    try:
        return from_json(RunRecord, data | {"schema_version": SCHEMA_VERSION})
    except (HarnessError, OverflowError) as exc:
        raise HarnessError(f"{where}: {exc}") from exc


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is no number")
