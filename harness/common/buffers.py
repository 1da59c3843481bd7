"""Memory that storage fills fast."""

from __future__ import annotations

import mmap
from contextlib import suppress


def direct_buffer(nbytes: int) -> mmap.mmap:
    """Page-aligned memory for direct I/O, of huge pages where the kernel gives them.

    A read into small pages is cut into a piece for each: in a virtual machine that halved the disk's bandwidth and
    took ten times the CPU time. Nothing is taken before it is written.
    """
    buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
