"""How an exception that ended a launch is told: its status, and the reason in one line."""

from __future__ import annotations

import errno

from harness.api import DiskFullError, HarnessError, InfeasibleError, Status, UnsupportedError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def classify(exc: BaseException) -> tuple[Status, str]:
    """Status and one-line reason of an exception, from its type, errno and (for CUDA) its name."""
    reason = f"{type(exc).__name__}: {exc}".splitlines()[0][:500]
    if isinstance(exc, InfeasibleError):
        return "infeasible", str(exc)
    if isinstance(exc, UnsupportedError):
        return "unsupported", str(exc)
    if isinstance(exc, DiskFullError):
        return "disk_full", str(exc)
    if isinstance(exc, HarnessError):
        return "error", str(exc)
    if type(exc).__name__ == "OutOfMemoryError":  # torch's, without importing torch
        return "oom_device", reason
    if isinstance(exc, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(exc):
        return "oom_host", reason
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            return "disk_full", reason
        cause = cause.__cause__ or cause.__context__
    if "No space left on device" in str(exc):  # libraries that turn errno into text
        return "disk_full", reason
    return "error", reason
