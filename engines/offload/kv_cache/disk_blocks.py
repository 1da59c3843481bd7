"""KV blocks on disk where the host attends: read ahead of attention, and written back behind it."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from engines.offload.kv_cache.offloaded_blocks import OffloadedBlocks, Run
from engines.offload.kv_cache.record_file import RecordFile
from engines.offload.memory.kv_blocks import STAGES
from harness.common.buffers import direct_buffer


class DiskBlocks(OffloadedBlocks):
    """Blocks in `file`, of `record` bytes a layer each, staged in memory."""

    def __init__(
        self, file: RecordFile, layers: int, num_blocks: int, record: int, slots: int, ahead: bool = True
    ) -> None:
        super().__init__(num_blocks, layers, ahead, slots)
        self._file = file
        self._record = record
        self.direct = file.direct
        memory = memoryview(direct_buffer(STAGES * slots * record))
        self._memory = [memory[i * slots * record : (i + 1) * slots * record] for i in range(STAGES)]
        self._stages = torch.frombuffer(memory, dtype=torch.uint8).view(STAGES, slots * record)
        self._reads: dict[int, Future[None]] = {}  # by stage

    def _stage(self, number: int) -> None:
        layer, part = self._of(number)
        self._reads[number % STAGES] = self._move(self._file.read, number, layer, part.read)
        self.bytes_read += self._bytes(part.read)

    def _wait(self, number: int) -> None:
        self._file.wait_for(self._reads[number % STAGES])

    def _write_back(self, number: int) -> None:
        layer, part = self._of(number)
        written = self._move(self._file.write, number, layer, part.write)
        self.bytes_written += self._bytes(part.write)
        if not self._ahead:
            self._file.wait_for(written)

    def _move(
        self, move: Callable[[int, Sequence[Run], memoryview], None], number: int, layer: int, runs: Sequence[Run]
    ) -> Future[None]:
        return self._file.submit(partial(move, layer, runs, self._memory[number % STAGES]))

    def _piece(self, block: int) -> int:
        return block // self._file.blocks_of_piece

    def _bytes(self, runs: Sequence[Run]) -> int:
        return sum(run.count for run in runs) * self._record
