"""How a launch is isolated: the work a worker process is given, what it gives back, and the launchers that run it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from harness.api.common import Refusal, Status
from harness.api.engine import LoadReport, Score, TraceEvent
from harness.api.machine import LocalModel
from harness.api.record import Accuracy, Measurement, MemoryLimit, RequestTrace
from harness.api.serving import ServedRate
from harness.api.spec import ModelSpec, RankLink, RunSpec

#: Receives progress: the phase (startup, load, warmup or generate), and the tokens done and expected so far.
EventSink = Callable[[str, int, int], None]


def ignore_events(phase: str, done: int, total: int) -> None:
    """An event sink for a worker whose progress is not shown."""


@dataclass(frozen=True)
class RunCell:
    """Load the cell's engine, warm up, generate and score under probes. Gives a `CellResult`.

    `launched`: when the worker was started, by `time.monotonic`, which all processes of a kernel share.
    `questions`: the file that `AskTask` wrote.
    """

    spec: RunSpec
    model: LocalModel
    cache: Path
    launched: float
    questions: Path | None = None


@dataclass(frozen=True)
class MeasureIdle:
    """Load and close the engine on a negligible model, or on none. Gives bytes that its process then holds: anonymous
    and shared memory, no files."""

    spec: RunSpec
    model: LocalModel | None
    cache: Path


@dataclass(frozen=True)
class PrepareModel:
    """Download, make or convert the model that an engine reads. Gives a `LocalModel`."""

    engine: str
    model: ModelSpec
    cache: Path


@dataclass(frozen=True)
class MeasureMachine:
    """Measure the disk that `folder` is on, and products of `gemm_shape` (k, n), on `threads` of the CPU, or with `gpu`
    on the device. Gives `MachineRates`."""

    folder: Path
    gemm_shape: tuple[int, int]
    dtypes: tuple[str, ...]
    threads: int | None = None
    gpu: bool = False


@dataclass(frozen=True)
class CalibrateHost:
    """Write a quick hardware profile of this host into the cache. Gives nothing."""

    cache: Path


@dataclass(frozen=True)
class AskTask:
    """Write a task's questions for a model into the file `questions`. Gives nothing.

    `data`: the folder of the task's data; None for the Hugging Face hub.
    """

    spec: RunSpec
    model: LocalModel
    cache: Path
    data: Path | None
    questions: Path


@dataclass(frozen=True)
class TaskAnswers:
    """A launch's answers, in the order of the questions: token ids of each prompt, and the score of each pair."""

    tokens: tuple[tuple[int, ...], ...] = ()
    scores: tuple[Score, ...] = ()


@dataclass(frozen=True)
class JudgeTask:
    """Say what answers to the questions of `asked` are worth. Gives an `Accuracy`."""

    asked: AskTask
    answers: TaskAnswers


Work = RunCell | MeasureIdle | PrepareModel | MeasureMachine | CalibrateHost | AskTask | JudgeTask
#: Runs the cell's engine, in the cell's sandbox; all other work runs in a process of the harness's own interpreter.
EngineWork = RunCell | MeasureIdle


@dataclass(frozen=True)
class CellResult:
    """What a worker measured of a cell: as far as it came, where it failed."""

    load: LoadReport | None = None
    requests: tuple[RequestTrace, ...] = ()
    served: tuple[ServedRate, ...] = ()
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    trace: tuple[TraceEvent, ...] = ()
    simulated: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    answers: TaskAnswers = TaskAnswers()


@dataclass(frozen=True)
class WorkerResult:
    """A worker's last word: the status and reason of its work, and as JSON what that work gives."""

    status: Status
    reason: str = ""
    value: Any = None


@dataclass(frozen=True)
class Outcome:
    """How a worker ended: the evidence. `result` is None where the worker did not live to write one.

    `refusal`: the worker was never started, or its end is known from elsewhere than from the worker. `measurements`: of
    the sandbox, before the worker was started.
    """

    result: WorkerResult | None
    exit_code: int
    timed_out: bool = False
    oom_kills: int = 0
    peak_bytes: int | None = None
    cap_method: str = "none"
    counts_page_cache: bool = False
    log_tail: str = "(none)"
    refusal: Refusal | None = None
    measurements: tuple[Measurement, ...] = ()


@dataclass(frozen=True)
class Exchange:
    """Where the harness meets a worker: the folder for its request and result (made and removed for each worker), its
    log, and who is told of its progress."""

    folder: Path
    log: Path
    on_event: EventSink = ignore_events


@dataclass(frozen=True)
class WorkerRequest:
    """Work for one worker and its limits: seconds, bytes of host memory, CPU threads, and whether it sees a device.

    `env`: environment variables beside those that every worker has. `ranks`: processes that the memory is divided
    over, the worker's own and those that its engine starts. `link`: what connects these; None for the host's own.
    """

    work: Work
    exchange: Exchange
    timeout_s: float
    limit_bytes: int | None = None
    threads: int | None = None
    gpu: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    link: RankLink | None = None


class Sandbox(Protocol):
    """A place where workers run, with packages of its own.

    `inherits_environment`: workers get the environment variables of the harness's process.
    """

    @property
    def inherits_environment(self) -> bool: ...

    def run(self, request: WorkerRequest) -> Outcome:
        """Returns when the worker and its children are gone, KeyboardInterrupt included. Raises HarnessError where
        the exchange folder or the log cannot be written."""

    def identity(self) -> Mapping[str, str]:
        """The packages that workers run with, for records and for the key of remembered searches; empty for those of
        the harness's own interpreter."""


@runtime_checkable
class Launcher(Protocol):
    """One kind of isolation, by its name in a suite (`launcher: docker`).

    Built with the cache folder; the constructor raises HarnessError with the remedy where this machine cannot isolate
    so at all.
    """

    def sandbox(self, spec: RunSpec, exchange: Exchange) -> Sandbox:
        """A cell's sandbox, made ready. Raises HarnessError where it cannot be: the cell's record then says why."""


@dataclass(frozen=True)
class LaunchRequest:
    """One launch of a cell: its policy settled, its model on this machine.

    `data`: the folder of a task's data; None for the Hugging Face hub.
    """

    spec: RunSpec
    repeat: int
    model: LocalModel
    exchange: Exchange
    data: Path | None = None


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended: the worker's measurements, and what only the launcher knows.

    `provenance`: packages, settings and sandbox that the engine ran with.
    """

    status: Status
    reason: str = ""
    started_at: str = ""
    wall_s: float = 0.0
    measured: CellResult = CellResult()
    memory: MemoryLimit | None = None
    accuracy: Accuracy | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
