"""Storage I/O: the bytes this process reads and writes, and the disk's sequential read rate."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from pathlib import Path

from harness.api import Measurement, Phase
from harness.common.buffers import direct_buffer


class DiskProbe:
    """Bytes read from and written to storage in one phase, page faults on mapped files included.

    Source: /proc/self/io, which includes children that have ended and been waited for.
    """

    def __enter__(self) -> DiskProbe:
        self._before = _counters()
        return self

    def __exit__(self, *exc: object) -> None:
        self._after = _counters()

    def measurements(self, phase: Phase) -> list[Measurement]:
        """`read_bytes` and `write_bytes`; no samples if the kernel does not account I/O."""
        measurements = []
        for name in ("read_bytes", "write_bytes"):
            known = name in self._before and name in self._after
            samples = (float(self._after[name] - self._before[name]),) if known else ()
            measurements.append(Measurement(name, "bytes", samples, phase, "" if known else "no /proc/self/io"))
        return measurements


def _counters() -> dict[str, int]:
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/io").read_text().splitlines()
        return {k: int(v) for k, _, v in (line.partition(": ") for line in lines)}
    return {}


def sequential_read_rates(folder: Path, seconds: float = 0.5, block: int = 16 << 20) -> list[float]:
    """Bytes/s of two sequential direct reads of the largest file below `folder`; empty if O_DIRECT is refused.

    Direct I/O bypasses the page cache, so the rates are the device's. Each read starts at the beginning of the file
    and stops after `seconds` or at its end. It runs twice because storage behind a virtual disk can serve the first
    access to a block slowly.
    """
    files = [p for p in folder.rglob("*") if p.is_file()]
    if not files:
        return []
    largest = max(files, key=lambda p: p.stat().st_size)
    try:
        descriptor = os.open(largest, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return []
    buffer = direct_buffer(block)
    try:
        return [rate for _ in range(2) if (rate := _read_rate(descriptor, buffer, seconds))]
    except OSError:
        return []
    finally:
        os.close(descriptor)
        buffer.close()


def _read_rate(descriptor: int, buffer: mmap.mmap, seconds: float) -> float:
    """Bytes/s of reading from the file's start into `buffer`, again and again, for `seconds` or to the file's end."""
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        count = os.preadv(descriptor, [buffer], done)
        done += count
        if count < len(buffer):
            break
    return done / (time.perf_counter() - start)
