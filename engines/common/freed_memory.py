"""Has the C library return freed memory to the system."""

import ctypes

#: From glibc's malloc.h.
_M_MMAP_THRESHOLD = -3


def return_freed_memory() -> None:
    """Makes glibc return freed blocks of 1 MiB and more, as other C libraries do by default.

    Else it keeps those below a threshold that grows to 32 MiB, in gaps that later blocks may not fit: what a pass
    computes with is freed and allocated again in ever other sizes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)  # an explicit value also stops it from growing
