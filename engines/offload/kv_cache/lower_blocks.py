"""KV blocks below a device, in pinned host memory and on disk: copied up ahead of attention, and back behind it.

A pass enqueues its copies in the device's two copy streams, each after the events that it must not overtake; the host
does not block for what is in memory. What is on disk goes through pinned stages: a thread reads it and then enqueues
its copies up, and writes it when its copies down are done.
"""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import torch

from engines.offload.device.protocol import Accelerator, Event
from engines.offload.kernels.layer_blocks import Target
from engines.offload.kv_cache.offloaded_blocks import OffloadedBlocks, Run
from engines.offload.kv_cache.record_file import RecordFile
from engines.offload.memory.kv_blocks import STAGES

#: The piece that blocks on disk are staged in.
STAGED = -1


@dataclass(frozen=True)
class HostLayer:
    """A layer's blocks in `pieces` [blocks of a piece, *block shape]; see KVBlocks."""

    pieces: Sequence[torch.Tensor]

    @property
    def rows(self) -> torch.Tensor:
        return self.pieces[0]

    @property
    def has_others(self) -> bool:
        return len(self.pieces) > 1

    def addresses(self, table: torch.Tensor) -> torch.Tensor:
        starts = torch.tensor([piece.data_ptr() for piece in self.pieces])
        per_piece, block = len(self.rows), self.rows.stride(0) * self.rows.itemsize
        return starts[table.long() // per_piece] + table.long() % per_piece * block

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        per_piece = len(self.rows)
        return torch.stack([self.pieces[block // per_piece][block % per_piece] for block in blocks.tolist()])

    def piece(self, number: int) -> torch.Tensor:
        """The blocks that PieceTarget names so."""
        return self.pieces[number]


@dataclass(frozen=True)
class StagedLayer:
    """A layer's blocks `in_memory`, so many, and behind them those `staged` from disk, [slots, *block shape]; see
    KVBlocks."""

    layer: HostLayer
    in_memory: int
    staged: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        return self.staged

    @property
    def has_others(self) -> bool:
        return self.in_memory > 0

    def addresses(self, table: torch.Tensor) -> torch.Tensor:
        step = self.staged.stride(0) * self.staged.itemsize
        staged = (table.long() - self.in_memory).clamp(min=0) * step + self.staged.data_ptr()
        if not self.in_memory:
            return staged
        return torch.where(table < self.in_memory, self.layer.addresses(table.clamp(max=self.in_memory - 1)), staged)

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        found = self.staged[(blocks - self.in_memory).clamp(min=0).long()]
        if (held := blocks < self.in_memory).any():
            found[held] = self.layer.gather(blocks[held])
        return found

    def piece(self, number: int) -> torch.Tensor:
        """As HostLayer.piece."""
        return self.staged if number == STAGED else self.layer.piece(number)


#: What the host attends to.
HostBlocks = HostLayer | StagedLayer
#: Where new tokens are written in one piece of any layer's HostBlocks: its number, and the target in its blocks.
PieceTarget = tuple[int, Target]


@dataclass(frozen=True)
class DiskPart:
    """The blocks on disk: their `file`, of `record` bytes a layer each, and pinned memory for each stage, uint8
    [records * record]."""

    file: RecordFile
    record: int
    stages: Sequence[torch.Tensor]

    def memory(self, stage: int) -> memoryview:
        """A stage's memory, for reads and writes."""
        return memoryview(cast(Any, self.stages[stage].numpy()))


class LowerBlocks(OffloadedBlocks):
    """Blocks of `block_shape` and `dtype`, staged on the device: the first in pinned memory, `pieces` of each layer
    (none where there are no such blocks), the others `on_disk`."""

    def __init__(
        self, pieces: Sequence[Sequence[torch.Tensor]], num_blocks: int, slots: int, block_shape: Sequence[int],
        dtype: torch.dtype, device: Accelerator, ahead: bool = True, on_disk: DiskPart | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_blocks, len(pieces), ahead, slots)
        self._host = [HostLayer([piece.view(dtype).view(-1, *block_shape) for piece in layer]) for layer in pieces]
        self._in_memory = sum(len(piece) for piece in self._host[0].pieces)
        self._per_piece = len(self._host[0].rows) if self._in_memory else 1
        self._block_bytes = math.prod(block_shape) * dtype.itemsize
        self._device = device
        self._disk = on_disk
        self._stages = torch.empty(STAGES, slots, *block_shape, dtype=dtype, device=device.where)
        self._free: list[Sequence[Event]] = [()] * STAGES  # when a stage may be overwritten
        #: By layer, the end of the last copies to pinned memory, and of those of the passes before this one.
        self._written: dict[int, Event] = {}
        self._written_before: dict[int, Event] = {}
        self._staged: dict[int, Sequence[Event]] = {}  # by stage, what its blocks in memory wait for
        self._reads: dict[int, Future[Event | None]] = {}  # by stage, of those on disk
        self._uploaded: dict[int, Event] = {}  # by stage, when its pinned memory was last read
        self._writes: dict[int, Future[None]] = {}  # by stage, of its pinned memory
        self._first_slots: Sequence[int] = ()

    def start(self, batches: Sequence[tuple[Iterable[int], Iterable[int]]]) -> list[torch.Tensor]:
        self._written_before = dict(self._written)
        moved = [(set(filled), set(written)) for filled, written in batches]
        # staged blocks have slots in the order of their numbers: those on disk come last, and have the first of the
        # pinned stage's
        self._first_slots = [sum(block < self._in_memory for block in filled | written) for filled, written in moved]
        return super().start(moved)

    @property
    def in_memory(self) -> int:
        """How many of the blocks are in pinned memory."""
        return self._in_memory

    def targets(self, tokens: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> list[PieceTarget]:
        """Where `tokens` of a batch are written that belong at `offsets` of `blocks`, of which those on disk have the
        numbers that they are staged under; all int64 [n]."""
        held = blocks < self._in_memory
        pieces = torch.where(held, blocks // self._per_piece, STAGED)
        inside = torch.where(held, blocks % self._per_piece, blocks - self._in_memory)
        return [
            (number, Target(tokens[there], inside[there], offsets[there], number == STAGED))
            for number in sorted(set(pieces.tolist()))
            for there in [pieces == number]
        ]

    def with_staged(self, layer: int, staged: torch.Tensor) -> StagedLayer:
        """As host_layer, with records uint8 [slots * record] of blocks on disk behind those in memory."""
        records = staged.view(self._stages.dtype).view(-1, self._on_disk.record // self._stages.itemsize)
        blocks = records[:, : math.prod(self._stages.shape[2:])].view(-1, *self._stages.shape[2:])
        return StagedLayer(self.host_layer(layer), self._in_memory, blocks)

    def host_layer(self, layer: int) -> HostLayer:
        """A layer's blocks in host memory, for the host to read and write; waits until what earlier passes wrote is
        there."""
        if layer in self._written_before:
            self._written_before[layer].synchronize()
        return self._host[layer]

    def _stage(self, number: int) -> None:
        (layer, part), stage = self._of(number), number % STAGES
        after = [*self._free[stage], *([self._written[layer]] if layer in self._written else [])]
        in_memory, on_disk = self._divided(part.read)
        pairs = [(self._on_device(stage, run), self._on_host(layer, run)) for run in in_memory]
        self._staged[stage] = (self._device.copy(pairs, after, kv=True),) if pairs else after
        self._reads.pop(stage, None)
        if on_disk:
            self._reads[stage] = self._read(number, on_disk, after)
        self.bytes_read += self._bytes(part.read)

    def _wait(self, number: int) -> None:
        stage = number % STAGES
        for event in self._staged[stage]:
            self._device.wait_event(event)
        if stage in self._reads:
            assert self._disk is not None
            copied = self._disk.file.wait_for(self._reads[stage])
            assert copied is not None
            self._device.wait_event(copied)

    def _write_back(self, number: int) -> None:
        (layer, part), stage = self._of(number), number % STAGES
        done: list[Event] = [self._device.mark()]
        in_memory, on_disk = self._divided(part.write)
        if in_memory:
            pairs = [(self._on_host(layer, run), self._on_device(stage, run)) for run in in_memory]
            self._written[layer] = self._device.copy(pairs, (done[0],), kv=True)
            done.append(self._written[layer])
        if on_disk:
            done.append(self._write(number, on_disk, done[0]))
        self._free[stage] = done
        self.bytes_written += self._bytes(part.write)
        if not self._ahead:
            done[-1].synchronize()
            self._wait_for_write(stage)

    def _read(self, number: int, runs: Sequence[Run], after: Sequence[Event]) -> Future[Event | None]:
        """Reads runs from disk, and then enqueues their copies to the device; the future has the copies' end."""
        disk, (layer, _), stage = self._on_disk, self._of(number), number % STAGES
        pairs = [(to, source) for source, to in self._pinned_pairs(number, runs)]
        staged = self._in_pinned_stage(number, runs)

        @torch.inference_mode()
        def read() -> Event:
            if stage in self._uploaded:
                self._uploaded[stage].synchronize()
            disk.file.read(layer, staged, disk.memory(stage))
            self._uploaded[stage] = self._device.copy(pairs, after, kv=True)
            return self._uploaded[stage]

        return disk.file.submit(read)

    def _write(self, number: int, runs: Sequence[Run], attended: Event) -> Event:
        """Enqueues copies of runs to the pinned stage, and has them written when they are there; returns the copies'
        end. Waits until what was last to be written from that stage is."""
        disk, (layer, _), stage = self._on_disk, self._of(number), number % STAGES
        self._wait_for_write(stage)
        copied = self._device.copy(self._pinned_pairs(number, runs), (attended,), kv=True)
        staged = self._in_pinned_stage(number, runs)

        def write() -> None:
            copied.synchronize()
            disk.file.write(layer, staged, disk.memory(stage))

        self._writes[stage] = disk.file.submit(write)
        return copied

    def _wait_for_write(self, stage: int) -> None:
        if (written := self._writes.pop(stage, None)) is not None:
            self._on_disk.file.wait_for(written)

    @property
    def _on_disk(self) -> DiskPart:
        assert self._disk is not None
        return self._disk

    def _divided(self, runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
        """The runs in memory, and those on disk."""
        return [r for r in runs if r.block < self._in_memory], [r for r in runs if r.block >= self._in_memory]

    def _piece(self, block: int) -> int:
        if block < self._in_memory:
            return block // self._per_piece
        return -1 - (block - self._in_memory) // self._on_disk.file.blocks_of_piece

    def _in_pinned_stage(self, number: int, runs: Sequence[Run]) -> list[Run]:
        """Runs on disk as they lie in the file and in the pinned stage."""
        first = self._first_slots[number % len(self._transfers)]
        return [Run(run.block - self._in_memory, run.slot - first, run.count) for run in runs]

    def _pinned_pairs(self, number: int, runs: Sequence[Run]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Where runs on disk lie in the pinned stage and on the device. Records may be longer than blocks: then each
        block is a copy of its own, as copies are of contiguous memory."""
        disk, stage = self._on_disk, number % STAGES
        records = disk.stages[stage].view(-1, disk.record)[:, : self._block_bytes]
        pairs = []
        for run, staged in zip(runs, self._in_pinned_stage(number, runs), strict=True):
            step = run.count if disk.record == self._block_bytes else 1
            for i in range(0, run.count, step):
                device = self._stages[stage, run.slot + i : run.slot + i + step]
                pinned = records[staged.slot + i : staged.slot + i + step].view(device.dtype).view(device.shape)
                pairs.append((pinned, device))
        return pairs

    def _on_host(self, layer: int, run: Run) -> torch.Tensor:
        piece, first = divmod(run.block, self._per_piece)
        return self._host[layer].pieces[piece][first : first + run.count]

    def _on_device(self, stage: int, run: Run) -> torch.Tensor:
        return self._stages[stage, run.slot : run.slot + run.count]

    def _bytes(self, runs: Sequence[Run]) -> int:
        return sum(run.count for run in runs) * self._block_bytes
