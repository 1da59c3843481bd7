"""The paged KV cache: keys and values in blocks of a few tokens, so memory follows what sequences really hold."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain

import torch

from engines.offload.kernels import Quantizer
from engines.offload.kernels.layer_blocks import LayerBlocks, RowWriter, Target, torch_writer
from engines.offload.kv_cache.block_manager import BlockManager, Chunk
from engines.offload.kv_cache.host_attention import HostAttention
from engines.offload.kv_cache.offloaded_blocks import OffloadedBlocks, divided, filled_blocks, union, written_blocks
from engines.offload.kv_store.store import KVStore
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.memory.storage import Plain, Storage
from harness.api import ModelShape


def block_layout(shape: ModelShape, stored: Storage) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape of one layer's block, keys and values, and what its elements are."""
    dtype = getattr(torch, stored.dtype) if isinstance(stored, Plain) else torch.uint8
    return (2, shape.num_kv_heads, BLOCK_SIZE, stored.row_bytes(shape.head_dim) // dtype.itemsize), dtype


class PagedCache(BlockManager):
    """Keys and values as `quantizer` stores them; a block has the same number in all layers.

    Blocks below `num_device_blocks` are where attention computes (`device`), in memory that the system gives as they
    are first written; the others are `offloaded`, and of these the last `num_disk_blocks` are on disk below a device.
    `begin` says which blocks the batches of a pass need, and divides batches into parts whose offloaded blocks are
    staged together. They go through the layers by `layer` and `leave`, with blocks numbered as `resolve` says. With
    `host_attention` single tokens attend to offloaded blocks where they are, so those are not staged for them. A
    `store` keeps the content of blocks that sequences give up; it needs all blocks to be where attention computes.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_device_blocks: int,
        stored: Storage,
        quantizer: Quantizer,
        offloaded: OffloadedBlocks | None = None,
        device: torch.device | None = None,
        host_attention: HostAttention | None = None,
        writer: RowWriter = torch_writer,
        num_disk_blocks: int = 0,
    ) -> None:
        num_offloaded = 0 if offloaded is None else offloaded.num_blocks
        super().__init__(num_device_blocks + num_offloaded, num_offloaded, num_disk_blocks)
        self.num_device_blocks = num_device_blocks
        self._block_shape, dtype = block_layout(shape, stored)
        self._rows = torch.empty(shape.num_layers, num_device_blocks, *self._block_shape, dtype=dtype, device=device)
        self._resident = [LayerBlocks(rows) for rows in self._rows]  # by layer
        self._quantizer = quantizer
        self._packs = not isinstance(stored, Plain)
        self._writer = writer
        self.offloaded = offloaded
        self.host_attention = host_attention
        self.store: KVStore | None = None  # of what sequences leave behind
        self._staged_writes: set[int] = set()  # offloaded blocks that this pass writes where they are staged
        self._slots: Sequence[torch.Tensor] = ()  # by part of the pass
        self._parts: Sequence[Sequence[tuple[int, range]]] = ()  # by batch, as `parts` gives them

    @property
    def dtype(self) -> torch.dtype:
        """Of a block's elements."""
        return self._rows.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return len(self._rows) * math.prod(self._block_shape) * self._rows.itemsize

    def keep(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        if self.store is None:
            return
        for block, block_hash in reversed(list(zip(blocks, hashes, strict=True))):  # of a prefix its end goes first
            if not self.store.touch(block_hash):
                content = self._rows[:, block].contiguous().cpu().view(torch.uint8)
                self.store.put(block_hash, bytearray(content.numpy().data.cast("B")))

    def restore(self, hashes: Sequence[bytes]) -> list[int]:
        blocks: list[int] = []
        if self.store is None:
            return blocks
        for block_hash in hashes[: min(self.store.worth_reading(hashes), self.num_free_blocks)]:
            [block] = self.allocate(1)
            if not self.store.get(block_hash, partial(self._fill, block)):
                self.free([block])
                break
            self.cache_block(block, block_hash)
            blocks.append(block)
        for block_hash in reversed(hashes[: len(blocks)]):
            self.store.touch(block_hash)
        return blocks

    def may_restore(self, hashes: Sequence[bytes]) -> bool:
        return self.store is not None and bool(hashes) and hashes[0] in self.store

    def _fill(self, block: int, content: bytearray) -> None:
        rows = self._rows[:, block]
        rows.copy_(torch.frombuffer(content, dtype=torch.uint8).view(rows.dtype).view(rows.shape))

    @property
    def max_blocks_per_sequence(self) -> int:
        """Blocks that a sequence can have: all, or those that a stage holds together."""
        if self.offloaded is None or self.offloaded.slots >= self.offloaded.num_blocks:
            return self.num_blocks
        return self.offloaded.slots

    def begin(self, batches: Sequence[Sequence[Chunk]]) -> None:
        """Begins a pass."""
        if self.offloaded is None:
            return
        first, chunks = self.num_device_blocks, chain.from_iterable(batches)
        self._staged_writes = self._written(c for c in chunks if c.count > 1 or not self.host_attention)
        moved: list[tuple[set[int], set[int]]] = []
        parts: list[list[tuple[int, range]]] = []
        for batch in batches:
            needs = [self._needs(chunk) for chunk in batch]
            filled, written = [each[0] for each in needs], [each[1] for each in needs]
            ranges = divided([a | b for a, b in needs], self.offloaded.slots)
            parts.append([(len(moved) + i, each) for i, each in enumerate(ranges)])
            moved += [(union(filled, each), union(written, each)) for each in ranges]
        self._parts = parts
        self._slots = self.offloaded.start(moved)
        if self.host_attention is not None:
            on_host = [[chunk for chunk in batch if self.attends_on_host(chunk)] for batch in batches]
            self.host_attention.begin(on_host, first)

    def _needs(self, chunk: Chunk) -> tuple[set[int], set[int]]:
        """The offloaded blocks that are staged for a chunk, filled ones and those that it writes."""
        if self.attends_on_host(chunk):
            return set(), set()
        first = self.num_device_blocks
        filled = {b - first for b in filled_blocks(chunk) if b >= first}
        return filled, {b - first for b in self._written([chunk])}

    def parts(self, batch: int, chunks: int) -> Sequence[tuple[int, range]]:
        """The parts of a batch of so many chunks: their numbers in the pass, and which of its chunks they have."""
        return self._parts[batch] if self.offloaded is not None else [(batch, range(chunks))]

    def attends_on_host(self, chunk: Chunk) -> bool:
        """Whether a chunk attends to its offloaded blocks where they are.

        Not where another sequence with the same prefix fills one of them in this pass: it does so where it is staged.
        """
        if not self.host_attention or chunk.count > 1:
            return False
        offloaded = [block for block in chunk.block_table if block >= self.num_device_blocks]
        return bool(offloaded) and self._staged_writes.isdisjoint(offloaded)

    def resolve(self, blocks: torch.Tensor, part: int) -> torch.Tensor:
        """The numbers that `layer` has these blocks of a part under in this pass; host tensors."""
        first = self.num_device_blocks
        if self.offloaded is None:
            return blocks
        slots = self._slots[part][(blocks - first).clamp(min=0).long()]
        return torch.where(blocks < first, blocks, (first + slots).to(blocks.dtype))

    def slot_mapping(
        self, part: int, rows: torch.Tensor | None, blocks: torch.Tensor, offsets: torch.Tensor
    ) -> list[Target]:
        """Where `rows` of a part (None: all) are written that belong at `offsets` of `blocks`; host tensors [n]."""
        blocks, first = self.resolve(blocks, part), self.num_device_blocks
        staged = blocks >= first
        if not staged.any():
            return [Target(rows, blocks, offsets, False)]
        rows = torch.arange(len(blocks)) if rows is None else rows
        parts = ((~staged, 0, False), (staged, first, True))
        return [Target(rows[m], blocks[m] - start, offsets[m], flag) for m, start, flag in parts if m.any()]

    def layer(self, layer: int, part: int) -> LayerBlocks:
        """A part's blocks of one layer. Blocks until the offloaded ones are staged; raises HarnessError if that
        failed."""
        if self.offloaded is None:
            return self._resident[layer]
        records = self.offloaded.staged(layer, part).view(self._rows.dtype).view(self.offloaded.slots, -1)
        staged = records[:, : math.prod(self._block_shape)].view(-1, *self._block_shape)
        return LayerBlocks(self._rows[layer], staged)

    def leave(self, layer: int, part: int) -> None:
        """A part has attended in a layer."""
        if self.offloaded is not None:
            self.offloaded.done(layer, part)

    def write(self, to: LayerBlocks, slots: Sequence[Target], key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores key and value [kv_heads, tokens, head_dim] of a part's tokens, in its order."""
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        if self._packs:
            keys, values = map(self._quantizer.pack, (keys, values))
        to.put(slots, keys, values, self._writer)

    def _written(self, chunks: Iterable[Chunk]) -> set[int]:
        """Offloaded blocks that chunks write to."""
        return {b for c in chunks for b in written_blocks(c) if b >= self.num_device_blocks}
