"""The contracts between harness, engines, suites and reports: frozen data and protocols, standard library only.

Units are in the names or stated: `_s` seconds, `_bytes` bytes, rates per second. Token counts are real,
non-pad tokens. Everything here is immutable, comparable and serialisable by `to_json` / `from_json`.
"""

from harness.api.buffers import direct_buffer
from harness.api.common import (
    DTYPE_BYTES,
    FINAL_STATUSES,
    SCHEMA_VERSION,
    Bits,
    DiskFullError,
    Dtype,
    HarnessError,
    InfeasibleError,
    Schedule,
    Status,
    Tune,
    UnsupportedError,
    first_line,
)
from harness.api.curve import interpolate
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
from harness.api.hardware import Disk, HardwareProfile, Link, Processor
from harness.api.intervals import union_length
from harness.api.lines import parse_record
from harness.api.machine import (
    LocalModel,
    MachineRates,
    ModelShape,
)
from harness.api.record import (
    Bound,
    EventSink,
    Forecast,
    Launcher,
    LaunchRequest,
    Measurement,
    MemoryLimit,
    Phase,
    Probe,
    RequestTrace,
    RunRecord,
    Trial,
)
from harness.api.roofline import roofline
from harness.api.serial import (
    from_json,
    to_json,
)
from harness.api.spec import (
    HardwareLimits,
    HardwareRequirements,
    ModelSpec,
    OffloadPolicy,
    RunSpec,
    SuiteSpec,
    WorkloadSpec,
)

__all__ = [
    "DTYPE_BYTES",
    "FINAL_STATUSES",
    "SCHEMA_VERSION",
    "Bits",
    "Bound",
    "Capabilities",
    "Disk",
    "DiskFullError",
    "Dtype",
    "Engine",
    "EngineTrace",
    "EventSink",
    "Forecast",
    "GenerationRequest",
    "GenerationResult",
    "HardwareLimits",
    "HardwareProfile",
    "HardwareRequirements",
    "HarnessError",
    "InfeasibleError",
    "Job",
    "LaunchRequest",
    "Launcher",
    "Link",
    "LoadReport",
    "LocalModel",
    "MachineRates",
    "Measurement",
    "MemoryLimit",
    "ModelShape",
    "ModelSpec",
    "OffloadPolicy",
    "Phase",
    "Probe",
    "Processor",
    "RequestTrace",
    "RunRecord",
    "RunSpec",
    "SamplingParams",
    "Schedule",
    "Score",
    "Status",
    "SuiteSpec",
    "TokenLogprob",
    "TraceEvent",
    "Trial",
    "Tune",
    "UnsupportedError",
    "Workload",
    "WorkloadSpec",
    "direct_buffer",
    "first_line",
    "from_json",
    "interpolate",
    "parse_record",
    "roofline",
    "to_json",
    "union_length",
]
