"""KV blocks in pinned host memory: copied to the device a layer ahead of attention, and back behind it.

A pass enqueues its copies in the device's two copy streams, each after the events that it must not overtake; the host
does not block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engines.offload.device.protocol import Accelerator, Event
from engines.offload.kv_cache.offloaded_blocks import OffloadedBlocks, Run
from engines.offload.memory.kv_blocks import STAGES


@dataclass(frozen=True)
class HostLayer:
    """A layer's blocks in `pieces` [blocks of a piece, *block shape]; see KVBlocks."""

    pieces: Sequence[torch.Tensor]

    @property
    def rows(self) -> torch.Tensor:
        return self.pieces[0]

    def addresses(self, table: torch.Tensor) -> torch.Tensor:
        starts = torch.tensor([piece.data_ptr() for piece in self.pieces])
        per_piece, block = len(self.rows), self.rows.stride(0) * self.rows.itemsize
        return starts[table.long() // per_piece] + table.long() % per_piece * block

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        per_piece = len(self.rows)
        return torch.stack([self.pieces[block // per_piece][block % per_piece] for block in blocks.tolist()])

    def put(self, which: int, blocks: torch.Tensor, offsets: torch.Tensor, new: torch.Tensor) -> None:
        """Writes keys (0) or values (1) `new` [tokens, kv_heads, ...] at `offsets` of `blocks`, both [tokens]."""
        per_piece = len(self.rows)
        for number in set((blocks // per_piece).tolist()):
            inside = blocks // per_piece == number
            self.pieces[number][:, which][blocks[inside] % per_piece, :, offsets[inside]] = new[inside]


class HostBlocks(OffloadedBlocks):
    """Blocks of `block_shape` and `dtype`, by layer in `pieces` of pinned memory, staged on the device."""

    def __init__(
        self,
        pieces: Sequence[Sequence[torch.Tensor]],
        num_blocks: int,
        block_shape: Sequence[int],
        dtype: torch.dtype,
        device: Accelerator,
        ahead: bool = True,
    ) -> None:
        self._host = [HostLayer([piece.view(dtype).view(-1, *block_shape) for piece in layer]) for layer in pieces]
        super().__init__(num_blocks, len(pieces), ahead, per_piece=len(self._host[0].rows))
        self._block_bytes = math.prod(block_shape) * dtype.itemsize
        self._device = device
        self._stages = torch.empty(STAGES, num_blocks, *block_shape, dtype=dtype, device=device.where)
        self._free: list[Sequence[Event]] = [()] * STAGES  # when a stage may be overwritten
        self._written_back: dict[int, Event] = {}  # by layer, the end of the last pass's copies to the host
        self._staged: dict[int, Sequence[Event]] = {}  # by layer, what its staged blocks wait for

    def host_layer(self, layer: int) -> HostLayer:
        """A layer's blocks in host memory, for the host to read and write; waits until what the device wrote is
        there."""
        if layer in self._written_back:
            self._written_back[layer].synchronize()
        return self._host[layer]

    def _stage(self, layer: int) -> None:
        after = [*self._free[layer % STAGES], *([self._written_back[layer]] if layer in self._written_back else [])]
        self._staged[layer] = after
        if self._read:
            pairs = [(self._on_device(layer, run), self._on_host(layer, run)) for run in self._read]
            self._staged[layer] = (self._device.copy(pairs, after, kv=True),)
            self.bytes_read += sum(run.count for run in self._read) * self._block_bytes

    def _wait(self, layer: int) -> None:
        for event in self._staged[layer]:
            self._device.join(event)

    def _write_back(self, layer: int) -> None:
        attended = self._device.mark()
        last = attended
        if self._write:
            pairs = [(self._on_host(layer, run), self._on_device(layer, run)) for run in self._write]
            last = self._device.copy(pairs, (attended,), kv=True)
            self.bytes_written += sum(run.count for run in self._write) * self._block_bytes
        self._written_back[layer] = last
        self._free[layer % STAGES] = (attended, last)
        if not self._ahead:
            last.synchronize()

    def _on_host(self, layer: int, run: Run) -> torch.Tensor:
        piece, first = divmod(run.block, self._per_piece)
        return self._host[layer].pieces[piece][first : first + run.count]

    def _on_device(self, layer: int, run: Run) -> torch.Tensor:
        return self._stages[layer % STAGES, run.slot : run.slot + run.count]
