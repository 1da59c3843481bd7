"""Statuses, dtypes and errors that all contracts use."""

from collections.abc import Mapping
from typing import Literal

SCHEMA_VERSION = 4

Status = Literal[
    "ok",  # every check passed and the figures may be used
    "oom_device",  # the device's memory ran out (the engine's own exception)
    "oom_host",  # the host limit was hit (cgroup OOM event, monitor kill or MemoryError)
    "disk_full",
    "timeout",
    "infeasible",  # refused before loading: the budget cannot hold what the engine needs
    "unsupported",  # the engine cannot run this model, policy or host, and says why
    "interrupted",  # the user or a signal ended the harness; run again on resume
    "skipped",  # not attempted, e.g. because no batch of its search survived
    "error",  # any other failure; the reason holds the last line of the log
]
#: Statuses that are a result about the engine: resuming a run does not repeat such a launch.
FINAL_STATUSES: frozenset[str] = frozenset({"ok", "oom_device", "oom_host", "timeout", "infeasible", "unsupported"})

Dtype = Literal["float32", "bfloat16", "float16"]
#: What products are computed in: a dtype, or whole numbers of eight bits that stand for weights and activations.
Arithmetic = Literal["float32", "bfloat16", "float16", "int8"]
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
Schedule = Literal["row", "zigzag", "sweep"]
#: Bits of a stored value; 16 is the checkpoint's precision.
Bits = Literal[3, 4, 8, 16]
#: How a cell's batch is chosen: as given; the largest that survives; by a plan, which also chooses the placement
#: (`search`) and the bits (`search_bits`).
Tune = Literal["none", "max_batch", "search", "search_bits"]

FORBID = {"extra": "forbid"}  # for pydantic's validation of suite files; no other effect


class HarnessError(Exception):
    """An error that the user can act on. Its text is one line: what is wrong, where, and what to do.

    `status`: the status of a launch that ends with this error.
    """

    status: Status = "error"


class HarnessErrors(HarnessError):
    """Several errors of one suite, whose text has a line for each."""


def first_line(exc: BaseException) -> str:
    """The first line of an exception's text, or the name of its type where the text is empty."""
    return str(exc).strip().partition("\n")[0] or type(exc).__name__


class Refusal(HarnessError):
    """A launch, or a step that prepares one, ended without a result; holds its record's status and reason."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class InfeasibleError(HarnessError):
    """The budget cannot hold what the engine needs; the text gives the numbers.

    `lacking`: the missing bytes by tier; empty if something other than memory is short.
    """

    status = "infeasible"

    def __init__(self, text: str, lacking: Mapping[str, float] | None = None) -> None:
        super().__init__(text)
        self.lacking = dict(lacking or {})


class DiskFullError(HarnessError):
    """The disk is too small for a write; the text says where and by how much."""

    status = "disk_full"


class UnsupportedError(HarnessError):
    """The engine cannot run this model, policy or host; the text says why."""

    status = "unsupported"
