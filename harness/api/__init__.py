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
    HarnessErrors,
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
from harness.api.machine import LocalModel, MachineRates, ModelDescription, ModelShape
from harness.api.nano import LayerTimes, NanoOperation, NanoOrder, NanoPipeline
from harness.api.online import Event, FinishedEvent, KVStoreStats, OnlineEngine, OnlineStats, RefusedEvent, TokenEvent
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
from harness.api.secrets import (
    HIDDEN,
    is_secret,
    is_secret_option,
    secrets_in,
    without_logins,
    without_secret_options,
    without_secrets,
    without_these,
)
from harness.api.serial import from_json, to_json
from harness.api.serving import Arrivals, Conversation, ServedRate, ServedRequest, Turn
from harness.api.spec import (
    HardwareLimits,
    HardwareRequirements,
    ModelSpec,
    OffloadPolicy,
    RankLink,
    RunSpec,
    SuiteSpec,
)
from harness.api.workload import LengthSpec, Slo, StopWhen, WorkloadSpec
