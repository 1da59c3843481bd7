"""KV blocks on disk: read a layer ahead of attention, and written back behind it."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engines.offload.disk.direct_file import DiskFile
from engines.offload.disk.throttle import Throttle
from engines.offload.kv_cache.staging import Run, staging
from engines.offload.memory.kv_blocks import STAGES
from engines.offload.timeline import Timeline
from harness.api import HarnessError
from harness.common.buffers import direct_buffer

_WORKERS = 2
#: The largest read or write in bytes, so that all workers get some.
_PIECE = 2 << 20


class DiskBlocks:
    """`num_blocks` blocks in an unnamed file, with a record of `record` bytes (a multiple of ALIGN) a layer each.

    See OffloadedBlocks. The blocks of a pass are staged in memory, layer by layer; what a layer's attention has written
    is written back after `done`, and its stage then serves the layer after the next. One thread keeps that order, so no
    record is read before it is written; its errors are raised by the next call. Without `ahead` a layer is read when
    attention asks for it and written before `done` returns.
    """

    def __init__(
        self,
        folder: Path,
        layers: int,
        num_blocks: int,
        record: int,
        timeline: Timeline,
        throttle: Throttle,
        ahead: bool = True,
    ) -> None:
        self._layers = layers
        self._ahead = STAGES if ahead else 0  # layers read before attention asks for them
        self.num_blocks = num_blocks
        self._record = record
        self._timeline = timeline
        self._file = DiskFile(folder, layers * num_blocks * record, "cache", throttle)
        self.direct = self._file.direct
        self._memory = memoryview(direct_buffer(STAGES * num_blocks * record))
        self._stages = torch.frombuffer(self._memory, dtype=torch.uint8).view(STAGES, num_blocks * record)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._arrived = threading.Condition()
        self._ready = self._written = -1  # the last layer read, and written; counted over all passes
        self._first = 0  # of this pass
        self._left = 0  # layers of this pass whose read is not enqueued
        self._read: Sequence[Run] = ()
        self._write: Sequence[Run] = ()
        self._failure: HarnessError | None = None
        self.bytes_read = self.bytes_written = 0
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="cache")
        self._keeper = threading.Thread(target=self._work, name="cache", daemon=True)
        self._keeper.start()

    def start(self, filled: Iterable[int], written: Iterable[int]) -> torch.Tensor:
        stages = staging(self.num_blocks, filled, written, max(1, _PIECE // self._record))
        self._read, self._write = stages.read, stages.write
        self._first += self._layers
        self._left = self._layers
        for _ in range(min(self._ahead, self._layers)):
            self._read_next()
        return stages.slots

    def staged(self, layer: int) -> torch.Tensor:
        if self._layers - self._left <= layer:
            self._read_next()
        self._wait(lambda: self._ready >= self._first + layer)
        return self._stages[layer % STAGES]

    def done(self, layer: int) -> None:
        number, runs = self._first + layer, self._write

        def write() -> None:
            self._transfer("write", layer, runs)
            self._written = number

        self._jobs.put(write)
        if not self._ahead:
            self._wait(lambda: self._written >= number)
        elif self._left:
            self._read_next()

    def close(self) -> None:
        """Ends the threads and frees the disk space. Idempotent."""
        if self._keeper.is_alive():
            self._jobs.put(None)
            self._keeper.join()
        self._workers.shutdown()
        self._file.close()

    def _wait(self, until: Callable[[], bool]) -> None:
        """Raises the error of a job that failed meanwhile."""
        began = time.perf_counter()
        with self._arrived:
            while not until() and self._failure is None:
                self._arrived.wait()
        if self._failure is not None:
            raise self._failure
        self._timeline.add("wait", "stall", began, time.perf_counter())

    def _read_next(self) -> None:
        """Enqueues the read of the next layer."""
        layer, runs, number = self._layers - self._left, self._read, self._first + self._layers - self._left
        self._left -= 1

        def read() -> None:
            self._transfer("read", layer, runs)
            self._ready = number

        self._jobs.put(read)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._failure is not None:
                continue
            try:
                job()
            except Exception as exc:  # any error must reach the waiting thread
                self._failure = exc if isinstance(exc, HarnessError) else HarnessError(f"cache on disk: {exc}")
            with self._arrived:  # the waiting thread checks under this lock, so it misses no change
                self._arrived.notify()

    def _transfer(self, what: str, layer: int, runs: Sequence[Run]) -> None:
        began = time.perf_counter()
        move = self._file.read if what == "read" else self._file.write

        def transfer(run: Run) -> int:
            start = (layer % STAGES * self.num_blocks + run.slot) * self._record
            size = run.count * self._record
            move(self._memory[start : start + size], (layer * self.num_blocks + run.block) * self._record)
            return size

        moved = sum(self._workers.map(transfer, runs))
        if what == "read":
            self.bytes_read += moved
        else:
            self.bytes_written += moved
        if runs:
            self._timeline.add("cache", f"{what} layer {layer}", began, time.perf_counter())
