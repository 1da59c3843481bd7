"""Rates of this machine by which plans are compared: products by rows, the disk by sizes. Measured once, and kept.

A plan must not change from one launch to the next because a moment was busy; `harness calibrate` measures again.
"""

import json
import os
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engines.offload.disk.direct_file import DiskFile
from engines.offload.disk.throttle import Throttle
from engines.offload.kernels import HostKernels
from engines.offload.memory.layout import READERS, TILE_VALUES
from engines.offload.memory.pass_time import PassRates
from engines.offload.memory.storage import PANEL
from engines.offload.weights.gemm import GemmBackend, seconds_per_value
from engines.offload.weights.kept_choices import KeptChoices
from harness.api import HarnessError
from harness.common.buffers import direct_buffer

#: Rows at which products are measured.
ROWS = (1, 16, 128, 1024)
#: Bytes of a read that are tried, and of the file.
_READ_BYTES, _FILE = (1 << 20, 4 << 20, 16 << 20), 64 << 20
_ROUNDS, _WRITES = 3, 2
#: Reads of a size are large enough that reach this share of the highest rate.
_ENOUGH = 0.95


class DiskRates(NamedTuple):
    """Bytes/s that arrive in reads of `read_bytes` bytes, and that are written."""

    read: float
    read_bytes: int
    write: float


def pass_rates(
    way: GemmBackend, hidden: int, kernels: HostKernels, scratch: Path, disk_limit: float | None
) -> PassRates | None:
    """The rates of multiplying weights about `hidden` wide in this `way`; None where the disk cannot be measured.

    The disk is that of `scratch`, at most at `disk_limit` bytes/s; the kept rates are in the cache of `kernels`.
    """
    kept, disk = KeptChoices(kernels.cache), disk_rates(kernels, scratch, disk_limit)
    if disk is None:
        return None
    key = ("seconds a value", way.label, hidden, kernels.threads)
    seconds = _numbers(kept, key, partial(seconds_per_value, way, hidden, kernels, ROWS))
    memory = way.stored.matrix_bytes(PANEL, TILE_VALUES) / PANEL / TILE_VALUES / seconds[1]
    return PassRates(disk.read, disk.read_bytes, partial(seconds_at, seconds), memory, disk.write)


def disk_rates(kernels: HostKernels, scratch: Path, disk_limit: float | None) -> DiskRates | None:
    """The disk's rates, as in `pass_rates`."""
    measured, kept = cache(lambda: _disk_rates(scratch)), KeptChoices(kernels.cache)
    disk = scratch.stat().st_dev if scratch.exists() else None  # another run's scratch folder may be on another one
    reads = _numbers(kept, ("read rates", disk), lambda: measured()[0])
    writes = _numbers(kept, ("write rates", disk), lambda: measured()[1])
    if not reads or not writes:
        return None
    read, write = max(reads.values()), max(writes.values())
    size = min(size for size, found in reads.items() if found >= _ENOUGH * read)
    return DiskRates(min(read, disk_limit or read), size, min(write, disk_limit or write))


def seconds_at(seconds: Mapping[int, float], rows: float) -> float:
    """Seconds of a value in a product of so many rows: linear between those measured, and on from the last two."""
    known = sorted(seconds.items())
    if rows > known[-1][0]:
        (low, before), (high, last) = known[-2:]
        return last + (rows - high) * max(0.0, last - before) / (high - low)
    return float(np.interp(rows, [at for at, _ in known], [value for _, value in known]))


def _numbers(
    kept: KeptChoices, key: tuple[Hashable, ...], measure: Callable[[], Mapping[int, float]]
) -> dict[int, float]:
    """Numbers by a whole number, as kept or else measured and kept; empty where there are none."""
    try:
        found = {int(at): float(number) for at, number in json.loads(kept.get(*key) or "{}").items()}
    except (ValueError, TypeError, AttributeError):
        found = {}
    if not found or not all(number > 0 for number in found.values()):
        found = dict(measure())
        if found:
            kept.keep(json.dumps(found), *key)
    return found


def _disk_rates(folder: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Bytes/s by the size of a read, and of a write, past the page cache, as weights are read and KV blocks written;
    none where no file can be written."""
    try:
        file = DiskFile(folder, _FILE, "a measurement of the disk", Throttle(None))
    except HarnessError:
        return {}, {}
    try:
        write = max(_FILE / _seconds_to_write(file, _READ_BYTES[-1]) for _ in range(_WRITES))
        reads = {size: max(_FILE / _seconds_to_read(file, size) for _ in range(_ROUNDS)) for size in _READ_BYTES}
        return reads, {_READ_BYTES[-1]: write}
    except HarnessError:
        return {}, {}
    finally:
        file.close()


def _seconds_to_write(file: DiskFile, size: int) -> float:
    """Seconds in which one thread writes the file, `size` bytes at a time."""
    with direct_buffer(size) as buffer:
        buffer.write(os.urandom(1 << 16) * (size >> 16))  # random: a disk may compress
        began = time.perf_counter()
        for offset in range(0, _FILE, size):
            file.write(memoryview(buffer), offset)
        return time.perf_counter() - began


def _seconds_to_read(file: DiskFile, size: int) -> float:
    """Seconds in which as many threads as read weights read the file, `size` bytes at a time."""
    offsets = iter(range(0, _FILE, size))  # which threads share: a step of a range's iterator is atomic

    def read() -> None:
        with direct_buffer(size) as buffer, memoryview(buffer) as view:
            for offset in offsets:
                file.read(view, offset)

    began = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        for reader in [pool.submit(read) for _ in range(READERS)]:
            reader.result()
    return time.perf_counter() - began
