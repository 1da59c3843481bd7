"""Keys and values of all running sequences in blocks of a few tokens, so that memory follows what is really there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from engines.offload.kernels import Quantizer
from engines.offload.kernels.layer_blocks import LayerBlocks, Target, targets_of
from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.memory.kv_blocks import BLOCK_SIZE, blocks_for
from engines.offload.memory.storage import Plain, Storage
from harness.api import ModelShape


class StagedBlocks(Protocol):
    """KVBlocks with another home, which come to where attention is for a layer of a pass: kv_disk.py, kv_host.py."""

    num_blocks: int

    def start(self, known: Iterable[int], touched: Iterable[int]) -> torch.Tensor:
        """Begins a pass: `known` blocks hold something, `touched` ones will. Where each is staged, by block:
        [blocks]."""
        ...

    def staged(self, layer: int) -> torch.Tensor:
        """The records uint8 [blocks * record] of this pass's blocks in a layer, in the order of `start`."""
        ...

    def done(self, layer: int) -> None:
        """All have attended to a layer."""
        ...


def block_layout(shape: ModelShape, stored: Storage) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape of one layer's block, keys and values, and what its elements are."""
    dtype = getattr(torch, stored.dtype) if isinstance(stored, Plain) else torch.uint8
    return (2, shape.num_kv_heads, BLOCK_SIZE, stored.row_bytes(shape.head_dim) // dtype.itemsize), dtype


class PagedCache(BlockManager):
    """Keys and values that are `stored` by `codec`; a block has the same number in all layers.

    Blocks of `memory` are on `device`, in memory that is taken as they are first written; those after them are
    `elsewhere`. A pass says by `begin` which blocks it needs; each of its batches goes through the layers by `layer`
    and `leave`, with blocks as `places` calls them. `host_attention`: single tokens need none of those elsewhere
    staged.
    """

    def __init__(
        self,
        shape: ModelShape,
        memory: int,
        stored: Storage,
        codec: Quantizer,
        elsewhere: StagedBlocks | None = None,
        device: torch.device | None = None,
        host_attention: bool = False,
    ) -> None:
        others = 0 if elsewhere is None else elsewhere.num_blocks
        super().__init__(memory + others, others)
        self._page_shape, dtype = block_layout(shape, stored)
        self._rows = torch.empty(shape.num_layers, memory, *self._page_shape, dtype=dtype, device=device)
        self._codec = codec
        self._elsewhere = elsewhere
        self._attended_at_home = host_attention
        self.first_elsewhere = memory
        self._filled: set[int] = set()  # blocks elsewhere that this pass writes where they are staged
        self._slots = torch.empty(0, dtype=torch.long)
        self._inside: list[int] = []  # by layer, the batches that have not left it

    def begin(self, parts: Sequence[tuple[Sequence[int], int, int]], batches: int) -> None:
        """A pass of so many batches, with parts (blocks, tokens cached before, tokens new)."""
        if self._elsewhere is None:
            return
        first = self.first_elsewhere
        many = [part for part in parts if part[2] > 1 or not self._attended_at_home]
        self._filled = _touched(many, first)
        staged = [part for part in parts if not self.attends_on_host(part[0], part[2])]
        known = {p - first for blocks, cached, _ in staged for p in blocks[: blocks_for(cached)] if p >= first}
        self._slots = self._elsewhere.start(known, {p - first for p in _touched(staged, first)})
        self._inside = [batches] * len(self._rows)

    def attends_on_host(self, blocks: Sequence[int], new: int) -> bool:
        """Whether so many new tokens attend to what they have elsewhere where it is.

        Not where it is only written in this pass, by another sequence that begins alike.
        """
        if not self._attended_at_home or new > 1:
            return False
        others = [p for p in blocks if p >= self.first_elsewhere]
        return bool(others) and self._filled.isdisjoint(others)

    def places(self, blocks: torch.Tensor) -> torch.Tensor:
        """What `layer` calls these blocks in this pass; host tensors."""
        first = self.first_elsewhere
        if self._elsewhere is None:
            return blocks
        other = (blocks - first).clamp(min=0).long()
        return torch.where(blocks < first, blocks, (first + self._slots[other]).to(blocks.dtype))

    def targets(self, tokens: torch.Tensor | None, blocks: torch.Tensor, offsets: torch.Tensor) -> list[Target]:
        """Where `tokens` of a batch, or all, are written that belong at `offsets` of `blocks`; host tensors [n]."""
        return targets_of(tokens, self.places(blocks), offsets, self.first_elsewhere)

    def layer(self, layer: int) -> LayerBlocks:
        """The blocks of one layer; waits for those elsewhere. Raises HarnessError for what happened there."""
        if self._elsewhere is None:
            return LayerBlocks(self._rows[layer])
        flat = self._elsewhere.staged(layer).view(self._rows.dtype)
        rows = self._rows[layer]
        strides = (len(flat) // self._elsewhere.num_blocks, *torch.empty(self._page_shape, device="meta").stride())
        return LayerBlocks(rows, flat.as_strided((self._elsewhere.num_blocks, *self._page_shape), strides))

    def leave(self, layer: int) -> None:
        """A batch has attended in a layer."""
        if self._elsewhere is None:
            return
        self._inside[layer] -= 1
        if not self._inside[layer]:
            self._elsewhere.done(layer)

    def write(self, to: LayerBlocks, targets: Sequence[Target], key: torch.Tensor, value: torch.Tensor) -> None:
        """Key and value [kv_heads, tokens, head_dim] of a batch's tokens, in its order."""
        for which, new in enumerate((key, value)):
            to.put(which, targets, self._codec.pack(new.transpose(0, 1)))


def _touched(parts: Sequence[tuple[Sequence[int], int, int]], first: int) -> set[int]:
    """KVBlocks from `first` on that parts (blocks, cached, new) write to."""
    return {
        p
        for blocks, cached, new in parts
        for p in blocks[cached // BLOCK_SIZE : blocks_for(cached + new)]
        if p >= first
    }
