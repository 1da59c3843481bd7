"""The file of KV blocks on disk: records moved by several threads, in the order in which they were asked for."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from engines.offload.disk.direct_file import DiskFile
from engines.offload.disk.throttle import Throttle
from engines.offload.kv_cache.offloaded_blocks import Run
from engines.offload.timeline import Timeline
from harness.api import HarnessError

T = TypeVar("T")

_WORKERS = 2
#: The largest read or write in bytes, so that all workers get some.
_PIECE = 2 << 20


class RecordFile:
    """`num_blocks` blocks with a record of `record` bytes (a multiple of ALIGN) a layer each, in an unnamed file.

    One thread keeps the order of what is submitted, so no record is read before it is written; an error ends all that
    follows, and is raised by the next `wait_for`. `blocks_of_piece`: the most that one read or write should move.
    """

    def __init__(
        self, folder: Path, layers: int, num_blocks: int, record: int, timeline: Timeline, throttle: Throttle
    ) -> None:
        self.blocks_of_piece = max(1, _PIECE // record)
        self._num_blocks = num_blocks
        self._record = record
        self._timeline = timeline
        self._file = DiskFile(folder, layers * num_blocks * record, "cache", throttle)
        self.direct = self._file.direct
        self._failure: HarnessError | None = None
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="cache")
        self._order = ThreadPoolExecutor(1, thread_name_prefix="cache-order")

    def close(self) -> None:
        """Ends the threads and frees the disk space. Idempotent."""
        self._order.shutdown()
        self._workers.shutdown()
        self._file.close()

    def submit(self, work: Callable[[], T]) -> Future[T | None]:
        """Runs `work`, which reads and writes, after what was submitted before, unless that has failed."""

        def run() -> T | None:
            if self._failure is None:
                try:
                    return work()
                except Exception as exc:  # any error must reach the waiting thread
                    self._failure = exc if isinstance(exc, HarnessError) else HarnessError(f"cache on disk: {exc}")
            return None

        return self._order.submit(run)

    def wait_for(self, work: Future[T | None]) -> T | None:
        """What the work returned. Raises the error of any that failed meanwhile."""
        began = time.perf_counter()
        result = work.result()
        if self._failure is not None:
            raise self._failure
        self._timeline.add("wait", "stall", began, time.perf_counter())
        return result

    def read(self, layer: int, runs: Sequence[Run], memory: memoryview) -> None:
        """Moves runs of a layer to their slots of `memory`; called by work that was submitted."""
        self._move("read", layer, runs, memory, self._file.read)

    def write(self, layer: int, runs: Sequence[Run], memory: memoryview) -> None:
        """The other way round."""
        self._move("write", layer, runs, memory, self._file.write)

    def _move(
        self, what: str, layer: int, runs: Sequence[Run], memory: memoryview, move: Callable[[memoryview, int], None]
    ) -> None:
        began = time.perf_counter()

        def transfer(run: Run) -> None:
            start, size = run.slot * self._record, run.count * self._record
            move(memory[start : start + size], (layer * self._num_blocks + run.block) * self._record)

        for _ in self._workers.map(transfer, runs):  # which raises what one of them did
            pass
        if runs:
            self._timeline.add("cache", f"{what} layer {layer}", began, time.perf_counter())
