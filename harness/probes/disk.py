"""The disk's sequential read rate."""

import mmap
import os
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path

from harness.common.buffers import direct_buffer


def sequential_read_rates(folder: Path, seconds: float = 0.5) -> list[float]:
    """Bytes/s of two sequential direct reads of the largest file below `folder`; empty if O_DIRECT is refused.

    Direct I/O bypasses the page cache, so the rates are the device's. Each read starts at the beginning of the file
    and stops after `seconds` or at its end. It runs twice because storage behind a virtual disk can serve the first
    access to a block slowly.
    """
    files = [p for p in folder.rglob("*") if p.is_file()]
    if not files:
        return []
    largest = max(files, key=lambda p: p.stat().st_size)
    direct = os.O_RDONLY | os.O_DIRECT
    with suppress(OSError), direct_buffer(16 << 20) as buffer, os.fdopen(os.open(largest, direct), "rb", 0) as file:
        return [rate for _ in range(2) if (rate := _read_rate(file, buffer, seconds))]
    return []


def _read_rate(file: FileIO, buffer: mmap.mmap, seconds: float) -> float:
    """Bytes/s of reading from the file's start into `buffer`, again and again, for `seconds` or to the file's end."""
    file.seek(0)
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        count = file.readinto(buffer)
        done += count
        if count < len(buffer):
            break
    return done / (time.perf_counter() - start)
