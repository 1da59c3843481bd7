"""Attention of a packed batch over the paged KV cache: each token attends to its own sequence, up to itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from engines.offload.device.protocol import Device
from engines.offload.kernels import AttentionKernel, AttentionMetadata, AttentionSpec, Hadamard
from engines.offload.kernels.layer_blocks import LayerBlocks, Target
from engines.offload.kv_cache.block_manager import Chunk
from engines.offload.kv_cache.host_attention import HostAttentionTask, HostChunks
from engines.offload.kv_cache.paged_cache import PagedCache
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.timeline import Timeline


@dataclass(frozen=True)
class AttentionContext:
    """What every attention of a loaded model shares.

    `kernel_beside`: `kernel` where it runs beside products. `value_topk`: see AttentionSpec. `hadamard` spreads outlier
    columns of keys and values before they are quantized; None where they are not. `run` executes a task, perhaps beside
    the products of other batches. `first_layer`: the model's number of the first layer that is loaded.
    """

    cache: PagedCache
    kernel: AttentionKernel
    kernel_beside: AttentionKernel
    timeline: Timeline
    device: Device
    run: Callable[[AttentionTask], torch.Tensor]
    value_topk: float = 1.0
    hadamard: Hadamard | None = None
    first_layer: int = 0


@dataclass(frozen=True)
class AttentionPart:
    """Rows `rows` of a batch, whose offloaded blocks are staged together as number `number` of the pass."""

    number: int
    rows: slice
    metadata: AttentionMetadata
    slot_mapping: Sequence[Target]


class PackedAttention:
    """The attention of one packed batch, number `batch` of its pass, whose rows are those of `chunks`, one after the
    other.

    The batch's keys and values are appended to the cache first. Attention reads what the cache holds, in its precision,
    whether this pass or an earlier one computed it: results do not depend on how a prompt was cut into passes.
    """

    def __init__(self, context: AttentionContext, chunks: Sequence[Chunk], batch: int) -> None:
        self.context = context
        cache, upload = context.cache, context.device.upload
        self.host_chunks: HostChunks | None = None
        seen = [(chunk.count, chunk.cached, chunk.block_table) for chunk in chunks]
        on_host = [i for i, chunk in enumerate(chunks) if cache.attends_on_host(chunk)]
        rows = list(accumulate((chunk.count for chunk in chunks), initial=0))
        if on_host:
            assert cache.host_attention is not None
            self.host_chunks = HostChunks(
                [rows[i] for i in on_host], [chunks[i] for i in on_host], cache.num_device_blocks, upload,
                cache.host_attention.parts(batch), cache.host_attention.blocks,
            )  # fmt: skip
            for i, rest in zip(on_host, self.host_chunks.on_device, strict=True):
                seen[i] = rest
        self.parts: list[AttentionPart] = []
        for number, among in cache.parts(batch, len(chunks)):
            counts, cached, tables = zip(*(seen[i] for i in among), strict=True)
            longest = max(1, *map(len, tables))
            block_table = torch.tensor([[*table, *[0] * (longest - len(table))] for table in tables], dtype=torch.int32)
            metadata = AttentionMetadata.of(counts, cached, cache.resolve(block_table, number), upload)
            of_part = slice(rows[among.start], rows[among.stop])
            slots = self._slots([chunks[i] for i in among], number, of_part.start)
            self.parts.append(AttentionPart(number, of_part, metadata, slots))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Query [heads, tokens, head_dim], key and value [kv_heads, tokens, head_dim]; returns [tokens, heads, dim]."""
        return self.context.run(AttentionTask(self, layer - self.context.first_layer, query, key, value, spec))

    def _slots(self, chunks: Sequence[Chunk], part: int, first: int) -> list[Target]:
        """Where keys and values of a part, whose rows begin at the batch's row `first`, are written, but for rows that
        host attention writes."""
        written_on_host = frozenset() if self.host_chunks is None else self.host_chunks.written_rows
        upload = self.context.device.upload
        tokens = [(c.block_table, t) for c in chunks for t in range(c.cached, c.cached + c.count)]
        slots = [
            (row, table[token // BLOCK_SIZE], token % BLOCK_SIZE)
            for row, (table, token) in enumerate(tokens)
            if first + row not in written_on_host
        ]
        rows, blocks, offsets = torch.tensor(slots, dtype=torch.long).view(-1, 3).T.contiguous()
        rows_written = None if len(slots) == len(tokens) else rows
        return [
            Target(None if t.tokens is None else upload(t.tokens), upload(t.blocks), upload(t.offsets), t.staged)
            for t in self.context.cache.slot_mapping(part, rows_written, blocks, offsets)
        ]


class AttentionTask:
    """One layer's attention of one batch: `launch` asks for it, `wait` gives the output. Holds its operands until then.

    Both are called once, in this order; a thread or stream of its own may run `launch`.
    """

    def __init__(
        self, batch: PackedAttention, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        spec: AttentionSpec,
    ) -> None:  # fmt: skip
        self._batch = batch
        self._layer = layer
        self._operands = query, key, value
        self._spec = spec
        self._on_host: HostAttentionTask | None = None
        self._output: torch.Tensor | None = None

    def launch(self, beside: bool = False) -> None:
        """Writes keys and values to the cache and calls the kernel, perhaps `beside` other batches' products; blocks
        while the cache's blocks arrive."""
        batch, context, layer = self._batch, self._batch.context, self._layer
        kernel = context.kernel_beside if beside else context.kernel
        first, *others = batch.parts
        blocks = context.cache.layer(layer, first.number)
        began = context.timeline.now()  # not before: the cache's waits have a lane of their own
        query, key, value = self._operands
        if context.hadamard is not None:
            rotated, key, value = map(context.hadamard, self._operands)
            query = rotated.to(query.dtype)  # units for 16 bits take no others
        host_attention = context.cache.host_attention
        if host_attention is not None and batch.host_chunks is not None:
            self._on_host = host_attention.launch(batch.host_chunks, layer, query, (key, value), self._spec)
        lse = None if self._on_host is None else self._on_host.lse
        if self._spec.value_topk != context.value_topk:
            self._spec = replace(self._spec, value_topk=context.value_topk)
        outputs = [self._attend(kernel, first, blocks, query, key, value, lse)]
        context.timeline.add("attention", f"layer {layer}", began, context.timeline.now())
        for part in others:
            blocks, began = context.cache.layer(layer, part.number), context.timeline.now()
            outputs.append(self._attend(kernel, part, blocks, query, key, value, lse))
            context.timeline.add("attention", f"layer {layer}", began, context.timeline.now())
        self._output = torch.cat(outputs) if others else outputs[0]

    def _attend(
        self, kernel: AttentionKernel, part: AttentionPart, blocks: LayerBlocks, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, lse: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Writes a part's keys and values to its `blocks` and attends to them."""
        context = self._batch.context
        if len(self._batch.parts) > 1:
            query, key, value = (tensor[:, part.rows] for tensor in (query, key, value))
            lse = None if lse is None else lse[part.rows]
        context.cache.write(blocks, part.slot_mapping, key, value)
        output = kernel(query, blocks, part.metadata, self._spec, lse)
        context.cache.leave(self._layer, part.number)
        return output

    def wait(self) -> torch.Tensor:
        """The output [tokens, heads, dim] for the caller's stream."""
        context = self._batch.context
        assert self._output is not None
        output = context.device.record_stream(self._output)
        if self._on_host is not None:
            self._on_host.merge_into(output)
        return output if context.hadamard is None else context.hadamard(output).to(self._operands[0].dtype)
