"""The contracts between harness, engines, suites and reports: frozen data and protocols, standard library only.

Units are in the names or stated: `_s` seconds, `_bytes` bytes, rates per second. Token counts are real,
non-pad tokens. Everything here is immutable, comparable and serialisable by `to_json` / `from_json`.
"""

from harness.api.common import (
    DTYPE_BYTES,
    FINAL_STATUSES,
    SCHEMA_VERSION,
    Arithmetic,
    Bits,
    DiskFullError,
    Dtype,
    HarnessError,
    InfeasibleError,
    Refusal,
    Schedule,
    Status,
    Tune,
    UnsupportedError,
    first_line,
)
from harness.api.engine import (
    Capabilities,
    Engine,
    EngineTrace,
    GenerationRequest,
    GenerationResult,
    Job,
    LoadReport,
    SamplingParams,
    Score,
    TokenLogprob,
    TraceEvent,
    Workload,
)
from harness.api.hardware import RESOURCE_WORDS, Disk, HardwareProfile, Link, Prices, Processor
from harness.api.launcher import (
    AskTask,
    CalibrateHost,
    CellResult,
    EngineWork,
    EventSink,
    Exchange,
    JudgeTask,
    Launcher,
    LaunchRequest,
    LaunchResult,
    MeasureIdle,
    MeasureMachine,
    Outcome,
    PrepareModel,
    RunCell,
    Sandbox,
    TaskAnswers,
    Work,
    WorkerRequest,
    WorkerResult,
    ignore_events,
)
from harness.api.machine import LocalModel, MachineRates, ModelShape
from harness.api.record import (
    Accuracy,
    Bound,
    Forecast,
    Measurement,
    MemoryLimit,
    Phase,
    Probe,
    RequestTrace,
    RunRecord,
    Trial,
    parse_record,
)
from harness.api.serial import from_json, to_json
from harness.api.spec import (
    HardwareLimits,
    HardwareRequirements,
    ModelSpec,
    OffloadPolicy,
    RunSpec,
    SuiteSpec,
    WorkloadSpec,
)
