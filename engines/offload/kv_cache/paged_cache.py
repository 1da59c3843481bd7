"""The paged KV cache: keys and values in blocks of a few tokens, so memory follows what sequences really hold."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from engines.offload.kernels import Quantizer
from engines.offload.kernels.layer_blocks import LayerBlocks, Target, targets_of
from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.memory.kv_blocks import BLOCK_SIZE, blocks_for
from engines.offload.memory.storage import Plain, Storage
from harness.api import ModelShape


class Chunk(Protocol):
    """What the cache needs of a scheduled chunk: `count` new tokens of a sequence that has `cached` before them."""

    @property
    def count(self) -> int: ...

    @property
    def cached(self) -> int: ...

    @property
    def block_table(self) -> Sequence[int]: ...


class OffloadedBlocks(Protocol):
    """KV blocks that live elsewhere and are staged, a layer at a time, where attention computes: disk_blocks.py and
    host_blocks.py. `bytes_read` and `bytes_written` count what was copied from and to there."""

    num_blocks: int
    bytes_read: int
    bytes_written: int

    def start(self, filled: Iterable[int], written: Iterable[int]) -> torch.Tensor:
        """Begins a pass that reads the `filled` blocks and writes the `written` ones. Returns int64 [blocks]: the slot
        in which each is staged."""

    def staged(self, layer: int) -> torch.Tensor:
        """The records uint8 [blocks * record] of this pass's blocks in a layer, by slot. Blocks until they are
        there."""

    def done(self, layer: int) -> None:
        """Every batch of the pass has attended in a layer."""


def block_layout(shape: ModelShape, stored: Storage) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape of one layer's block, keys and values, and what its elements are."""
    dtype = getattr(torch, stored.dtype) if isinstance(stored, Plain) else torch.uint8
    return (2, shape.num_kv_heads, BLOCK_SIZE, stored.row_bytes(shape.head_dim) // dtype.itemsize), dtype


class PagedCache(BlockManager):
    """Keys and values as `quantizer` stores them; a block has the same number in all layers.

    Blocks below `num_device_blocks` are where attention computes (`device`), in memory that the system gives as they
    are first written; the others are `offloaded`. `begin` says which blocks a pass needs. Each of its batches goes
    through the layers by `layer` and `leave`, with blocks numbered as `resolve` says. With `host_attention` single
    tokens attend to offloaded blocks where they are, so those are not staged for them.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_device_blocks: int,
        stored: Storage,
        quantizer: Quantizer,
        offloaded: OffloadedBlocks | None = None,
        device: torch.device | None = None,
        host_attention: bool = False,
    ) -> None:
        num_offloaded = 0 if offloaded is None else offloaded.num_blocks
        super().__init__(num_device_blocks + num_offloaded, num_offloaded)
        self.num_device_blocks = num_device_blocks
        self._block_shape, dtype = block_layout(shape, stored)
        self._rows = torch.empty(shape.num_layers, num_device_blocks, *self._block_shape, dtype=dtype, device=device)
        self._quantizer = quantizer
        self.offloaded = offloaded
        self._host_attention = host_attention
        self._staged_writes: set[int] = set()  # offloaded blocks that this pass writes where they are staged
        self._slots = torch.empty(0, dtype=torch.long)
        self._batches_left: list[int] = []  # by layer

    def begin(self, chunks: Sequence[Chunk], batches: int) -> None:
        """Begins a pass over `chunks` in so many batches."""
        if self.offloaded is None:
            return
        first = self.num_device_blocks
        self._staged_writes = self._written(c for c in chunks if c.count > 1 or not self._host_attention)
        staged = [chunk for chunk in chunks if not self.attends_on_host(chunk)]
        filled = {b - first for c in staged for b in c.block_table[: blocks_for(c.cached)] if b >= first}
        self._slots = self.offloaded.start(filled, {b - first for b in self._written(staged)})
        self._batches_left = [batches] * len(self._rows)

    def attends_on_host(self, chunk: Chunk) -> bool:
        """Whether a chunk attends to its offloaded blocks where they are.

        Not where another sequence with the same prefix fills one of them in this pass: it does so where it is staged.
        """
        if not self._host_attention or chunk.count > 1:
            return False
        offloaded = [block for block in chunk.block_table if block >= self.num_device_blocks]
        return bool(offloaded) and self._staged_writes.isdisjoint(offloaded)

    def resolve(self, blocks: torch.Tensor) -> torch.Tensor:
        """The numbers that `layer` has these blocks under in this pass; host tensors."""
        first = self.num_device_blocks
        if self.offloaded is None:
            return blocks
        slots = self._slots[(blocks - first).clamp(min=0).long()]
        return torch.where(blocks < first, blocks, (first + slots).to(blocks.dtype))

    def slot_mapping(self, rows: torch.Tensor | None, blocks: torch.Tensor, offsets: torch.Tensor) -> list[Target]:
        """Where `rows` of a batch (None: all) are written that belong at `offsets` of `blocks`; host tensors [n]."""
        return targets_of(rows, self.resolve(blocks), offsets, self.num_device_blocks)

    def layer(self, layer: int) -> LayerBlocks:
        """The blocks of one layer. Blocks until the offloaded ones are staged; raises HarnessError if that failed."""
        if self.offloaded is None:
            return LayerBlocks(self._rows[layer])
        records = self.offloaded.staged(layer).view(self._rows.dtype)
        count = self.offloaded.num_blocks
        strides = (len(records) // count, *torch.empty(self._block_shape, device="meta").stride())
        return LayerBlocks(self._rows[layer], records.as_strided((count, *self._block_shape), strides))

    def leave(self, layer: int) -> None:
        """A batch has attended in a layer."""
        if self.offloaded is None:
            return
        self._batches_left[layer] -= 1
        if not self._batches_left[layer]:
            self.offloaded.done(layer)

    def write(self, to: LayerBlocks, slots: Sequence[Target], key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores key and value [kv_heads, tokens, head_dim] of a batch's tokens, in its order."""
        for which, new in enumerate((key, value)):
            to.put(which, slots, self._quantizer.pack(new.transpose(0, 1)))

    def _written(self, chunks: Iterable[Chunk]) -> set[int]:
        """Offloaded blocks that chunks write to."""
        return {
            block
            for c in chunks
            for block in c.block_table[c.cached // BLOCK_SIZE : blocks_for(c.cached + c.count)]
            if block >= self.num_device_blocks
        }
