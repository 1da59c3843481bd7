"""The status and one-line reason that a record gets for an exception."""

import errno

from harness.api import HarnessError, Refusal

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def classify(exc: BaseException) -> Refusal:
    """The status and reason of an exception, from its class, errno and text."""
    if isinstance(exc, HarnessError):
        return Refusal(exc.status, str(exc))
    reason = f"{type(exc).__name__}: {exc}".splitlines()[0][:500]
    if type(exc).__name__ == "OutOfMemoryError":  # torch's, without importing torch
        return Refusal("oom_device", reason)
    if isinstance(exc, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(exc):
        return Refusal("oom_host", reason)
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            return Refusal("disk_full", reason)
        if isinstance(cause, OSError) and cause.errno == errno.ENOMEM:  # a memory map, such as resident weights
            return Refusal("oom_host", reason)
        cause = cause.__cause__ or cause.__context__
    if "No space left on device" in str(exc):  # some libraries keep only the text of errno
        return Refusal("disk_full", reason)
    return Refusal("error", reason)
