"""Rates of this machine by which plans are compared: products by rows, reads by their size. Measured once, and kept.

A plan must not change from one launch to the next because a moment was busy; `harness calibrate` measures again.
"""

import json
import os
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

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
_ROUNDS = 3
#: Reads of a size are large enough that reach this share of the highest rate.
_ENOUGH = 0.95


def pass_rates(
    way: GemmBackend, hidden: int, kernels: HostKernels, scratch: Path, disk_limit: float | None
) -> PassRates | None:
    """The rates of multiplying weights about `hidden` wide in this `way`; None where the disk cannot be measured.

    The disk is that of `scratch`, at most at `disk_limit` bytes/s; the kept rates are in the cache of `kernels`.
    """
    kept, reads = KeptChoices(kernels.cache), read_rate(kernels, scratch, disk_limit)
    if reads is None:
        return None
    key = ("seconds a value", way.label, hidden, kernels.threads)
    seconds = _numbers(kept, key, partial(seconds_per_value, way, hidden, kernels, ROWS))
    memory = way.stored.matrix_bytes(PANEL, TILE_VALUES) / PANEL / TILE_VALUES / seconds[1]
    return PassRates(*reads, partial(seconds_at, seconds), memory)


def read_rate(kernels: HostKernels, scratch: Path, disk_limit: float | None) -> tuple[float, int] | None:
    """Bytes/s that arrive from disk, and the bytes of a read at which they do, as in `pass_rates`."""
    reads = _numbers(KeptChoices(kernels.cache), ("read rates",), lambda: _read_rates(scratch))
    if not reads:
        return None
    rate = max(reads.values())
    size = min(size for size, found in reads.items() if found >= _ENOUGH * rate)
    return min(rate, disk_limit or rate), size


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


def _read_rates(folder: Path) -> dict[int, float]:
    """Bytes/s by the size of a read, past the page cache as weights are read; empty where no file can be written."""
    try:
        file = DiskFile(folder, _FILE, "a measurement of the disk", Throttle(None))
    except HarnessError:
        return {}
    try:
        with direct_buffer(_READ_BYTES[-1]) as buffer:
            buffer.write(os.urandom(1 << 16) * (_READ_BYTES[-1] >> 16))  # random: a disk may compress
            for offset in range(0, _FILE, _READ_BYTES[-1]):
                file.write(memoryview(buffer), offset)
        return {size: max(_FILE / _seconds_to_read(file, size) for _ in range(_ROUNDS)) for size in _READ_BYTES}
    except HarnessError:
        return {}
    finally:
        file.close()


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
