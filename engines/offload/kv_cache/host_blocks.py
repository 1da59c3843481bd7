"""Keys and values whose home is pinned host memory: on the device a layer ahead of attention, and back behind it.

Copies of a pass follow each other in the device's two copy streams, each after the events that it must not overtake:
the host asks for them and goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engines.offload.device.protocol import Device, Event
from engines.offload.kv_cache.staging import Run, staging
from engines.offload.memory.kv_blocks import STAGES, blocks_per_piece


@dataclass(frozen=True)
class HostLayer:
    """A layer's blocks in `pieces`, [blocks of a piece, *block] each; to kernels of the host the same as
    LayerBlocks."""

    pieces: Sequence[torch.Tensor]

    @property
    def rows(self) -> torch.Tensor:
        """Some of the blocks."""
        return self.pieces[0]

    def addresses(self, table: torch.Tensor) -> torch.Tensor:
        """Where each block of `table` begins in memory, int64."""
        starts = torch.tensor([piece.data_ptr() for piece in self.pieces])
        whole, block = len(self.rows), self.rows.stride(0) * self.rows.itemsize
        return starts[table.long() // whole] + table.long() % whole * block

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """[n, 2, kv_heads, BLOCK_SIZE, ...] of n blocks."""
        whole = len(self.rows)
        return torch.stack([self.pieces[block // whole][block % whole] for block in blocks.tolist()])

    def put(self, which: int, blocks: torch.Tensor, offsets: torch.Tensor, new: torch.Tensor) -> None:
        """Writes keys (0) or values (1) `new` [tokens, kv_heads, ...] at `offsets` of `blocks`, both [tokens]."""
        whole = len(self.rows)
        for number in set((blocks // whole).tolist()):
            there = blocks // whole == number
            self.pieces[number][:, which][blocks[there] % whole, :, offsets[there]] = new[there]


def _as_blocks(piece: torch.Tensor, block: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    record = math.prod(block) * dtype.itemsize
    return piece[: len(piece) // record * record].view(dtype).view(-1, *block)


class HostBlocks:
    """`blocks` blocks of `page_shape`, stored as `dtype`, by layer in pieces of pinned memory; see StagedBlocks and
    blocks.pieces.

    A layer of them is staged on the device while the layer before is attended to. Without `ahead` it is copied when
    it is asked for, and copied back before `done` returns.
    """

    def __init__(
        self,
        home: Sequence[Sequence[torch.Tensor]],
        blocks: int,
        page_shape: Sequence[int],
        dtype: torch.dtype,
        device: Device,
        ahead: bool = True,
    ) -> None:
        self.num_blocks = blocks
        self._home = home
        self._record = record = math.prod(page_shape) * dtype.itemsize
        self._whole = blocks_per_piece(record)
        self._views = [[_as_blocks(piece, page_shape, dtype) for piece in layer] for layer in home]
        self._device = device
        self._ahead = STAGES if ahead else 0
        self._stages = torch.empty(STAGES, blocks * record, dtype=torch.uint8, device=device.where)
        self._free: list[Sequence[Event]] = [()] * STAGES  # when a stage may be overwritten
        self._back: dict[int, Event] = {}  # by layer, when the last pass's blocks were home
        self._there: dict[int, Sequence[Event]] = {}  # by layer of this pass, when its blocks are staged
        self._read: Sequence[Run] = ()
        self._write: Sequence[Run] = ()

    def start(self, known: Iterable[int], touched: Iterable[int]) -> torch.Tensor:
        found = staging(self.num_blocks, known, touched, self._whole, self._whole)
        self._read, self._write = found.read, found.write
        self._there = {}
        for layer in range(min(self._ahead, len(self._home))):
            self._stage(layer)
        return found.slots

    def staged(self, layer: int) -> torch.Tensor:
        if layer not in self._there:
            self._stage(layer)
        for event in self._there[layer]:
            self._device.join(event)
        return self._stages[layer % STAGES]

    def at_home(self, layer: int) -> HostLayer:
        """A layer's blocks where they are at home, for the host; waits until what was copied back is there."""
        if layer in self._back:
            self._back[layer].synchronize()
        return HostLayer(self._views[layer])

    def done(self, layer: int) -> None:
        attended = self._device.mark()
        last = attended
        if self._write:
            pairs = [(self._at_home(layer, run), self._on_device(layer, run)) for run in self._write]
            last = self._device.copy(pairs, (attended,), blocks=True)
        self._back[layer] = last
        self._free[layer % STAGES] = (attended, last)
        if not self._ahead:
            last.synchronize()
        elif layer + STAGES < len(self._home):
            self._stage(layer + STAGES)

    def _stage(self, layer: int) -> None:
        """Asks for the copies of a layer's blocks to their places on the device."""
        after = [*self._free[layer % STAGES], *([self._back[layer]] if layer in self._back else [])]
        self._there[layer] = after
        if self._read:
            pairs = [(self._on_device(layer, run), self._at_home(layer, run)) for run in self._read]
            self._there[layer] = (self._device.copy(pairs, after, blocks=True),)

    def _at_home(self, layer: int, run: Run) -> torch.Tensor:
        piece, first = divmod(run.block, self._whole)
        return self._home[layer][piece][first * self._record : (first + run.count) * self._record]

    def _on_device(self, layer: int, run: Run) -> torch.Tensor:
        return self._stages[layer % STAGES][run.slot * self._record : (run.slot + run.count) * self._record]
