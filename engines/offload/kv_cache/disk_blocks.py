"""KV blocks on disk: read a layer ahead of attention, and written back behind it."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from engines.offload.disk.direct_file import DiskFile
from engines.offload.disk.throttle import Throttle
from engines.offload.kv_cache.offloaded_blocks import OffloadedBlocks, Run
from engines.offload.memory.kv_blocks import STAGES
from engines.offload.timeline import Timeline
from harness.api import HarnessError
from harness.common.buffers import direct_buffer

_WORKERS = 2
#: The largest read or write in bytes, so that all workers get some.
_PIECE = 2 << 20


class DiskBlocks(OffloadedBlocks):
    """Blocks in an unnamed file, with a record of `record` bytes (a multiple of ALIGN) a layer each, staged in memory.

    One thread keeps the order of reads and writes, so no record is read before it is written; its errors are raised by
    the next call.
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
        super().__init__(num_blocks, layers, ahead, per_piece=max(1, _PIECE // record))
        self._record = record
        self._timeline = timeline
        self._file = DiskFile(folder, layers * num_blocks * record, "cache", throttle)
        self.direct = self._file.direct
        self._memory = memoryview(direct_buffer(STAGES * num_blocks * record))
        self._stages = torch.frombuffer(self._memory, dtype=torch.uint8).view(STAGES, num_blocks * record)
        self._reads: dict[int, Future[None]] = {}  # by layer, of this pass or the last
        self._failure: HarnessError | None = None
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="cache")
        self._order = ThreadPoolExecutor(1, thread_name_prefix="cache-order")

    def close(self) -> None:
        """Ends the threads and frees the disk space. Idempotent."""
        self._order.shutdown()
        self._workers.shutdown()
        self._file.close()

    def _stage(self, layer: int) -> None:
        self._reads[layer] = self._order.submit(self._transfer, "read", layer, self._read)

    def _wait(self, layer: int) -> None:
        self._wait_for(self._reads[layer])

    def _write_back(self, layer: int) -> None:
        written = self._order.submit(self._transfer, "write", layer, self._write)
        if not self._ahead:
            self._wait_for(written)

    def _wait_for(self, transfer: Future[None]) -> None:
        """Raises the error of any transfer that failed meanwhile."""
        began = time.perf_counter()
        transfer.result()
        if self._failure is not None:
            raise self._failure
        self._timeline.add("wait", "stall", began, time.perf_counter())

    def _transfer(self, what: str, layer: int, runs: Sequence[Run]) -> None:
        """Moves a layer's runs, unless an earlier transfer has failed."""
        if self._failure is not None:
            return
        try:
            self._move(what, layer, runs)
        except Exception as exc:  # any error must reach the waiting thread
            self._failure = exc if isinstance(exc, HarnessError) else HarnessError(f"cache on disk: {exc}")

    def _move(self, what: str, layer: int, runs: Sequence[Run]) -> None:
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
