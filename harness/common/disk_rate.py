"""The disk's sequential read rate."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

from harness.common.buffers import direct_buffer

#: Reads in flight, one a thread, and bytes of each: as many as the fastest engine keeps, or more.
_READERS, _PIECE = 4, 8 << 20
#: Files that are read, the largest ones.
_FILES = 64


def sequential_read_rates(folder: Path, seconds: float = 1.0) -> list[float]:
    """Bytes/s of two sequential direct reads of the files below `folder`; empty if O_DIRECT is refused.

    Direct I/O bypasses the page cache, so the rates are the device's. Threads share each read, which starts at the
    beginning and stops after `seconds` or at the end. It runs twice because storage behind a virtual disk can serve the
    first access to a block slowly.
    """
    files = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: -p.stat().st_size)[:_FILES]
    with ExitStack() as opened, suppress(OSError):
        pieces = []
        for path in files:
            file = opened.enter_context(os.fdopen(os.open(path, os.O_RDONLY | os.O_DIRECT), "rb", 0))
            pieces += [(file.fileno(), offset) for offset in range(0, path.stat().st_size, _PIECE)]
        return [rate for _ in range(2) if (rate := _read_rate(pieces, seconds))]
    return []


def _read_rate(pieces: Sequence[tuple[int, int]], seconds: float) -> float:
    """Bytes/s of reading pieces (descriptor, offset) in order for `seconds`, or all of them."""
    left = iter(pieces)  # which threads share: a step of a list's iterator is atomic
    start = time.perf_counter()

    def read() -> int:
        done = 0
        with direct_buffer(_PIECE) as buffer:
            for descriptor, offset in left:
                if time.perf_counter() - start > seconds:
                    break
                done += os.preadv(descriptor, [buffer], offset)
        return done

    with ThreadPoolExecutor(_READERS) as pool:
        done = sum(reader.result() for reader in [pool.submit(read) for _ in range(_READERS)])
    return done / (time.perf_counter() - start)
