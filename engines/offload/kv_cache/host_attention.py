"""Host attention: the CPU attends to KV blocks in host memory while the device attends to its own and computes on.

Blocks on disk are read into host memory for it, a part of a batch at a time, and never come to the device. Queries
and the new tokens' keys and values go down and outputs come up, never the blocks: FlexGen (Sheng et al. 2023), section
4.1, "CPU computation", here for quantized blocks too, and for sequences with blocks on both sides, whose two
attention states are merged.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from engines.offload.device.protocol import Accelerator
from engines.offload.kernels import AttentionKernel, AttentionMetadata, AttentionSpec, Quantizer, RowMerger
from engines.offload.kernels.layer_blocks import RowWriter
from engines.offload.kv_cache.block_manager import Chunk
from engines.offload.kv_cache.disk_blocks import DiskBlocks
from engines.offload.kv_cache.lower_blocks import HostBlocks, LowerBlocks, PieceTarget
from engines.offload.kv_cache.offloaded_blocks import divided, filled_blocks, union, written_blocks
from engines.offload.memory.kv_blocks import BLOCK_SIZE, blocks_for
from engines.offload.timeline import Timeline


@dataclass(frozen=True)
class StagedPart:
    """Those `among` the chunks of a batch whose blocks on disk are staged together, as number `number` of the pass.

    `slots`: where each block on disk is staged, int64 [blocks on disk]; None where there are none.
    """

    number: int
    among: range
    slots: torch.Tensor | None = None


@dataclass(frozen=True)
class HostPart:
    """A part's chunks `among` those of its batch, and where those of the batch's written tokens that are theirs go."""

    number: int
    among: range
    metadata: AttentionMetadata
    targets: Sequence[PieceTarget]


class HostChunks:
    """The chunks of a batch that host attention serves: single tokens, in rows `rows` of the batch, in `parts`.

    Blocks from `first` on are the `lower` ones. `on_device`: of each chunk what the device attends to, as (new tokens,
    tokens before, block table). `written_rows`: rows whose keys and values belong to the host's blocks.
    """

    def __init__(
        self, rows: Sequence[int], chunks: Sequence[Chunk], first: int, upload: Callable[[torch.Tensor], torch.Tensor],
        parts: Sequence[StagedPart], lower: LowerBlocks,
    ) -> None:  # fmt: skip
        in_memory = lower.in_memory
        tables = [[block - first for block in chunk.block_table if block >= first] for chunk in chunks]
        tokens = [_tokens(chunk, lambda block: block >= first) for chunk in chunks]
        self.on_device = [
            (1, _tokens(chunk, lambda block: block < first) - 1, [b for b in chunk.block_table if b < first])
            for chunk in chunks
        ]
        slots = [
            (row, chunk.block_table[chunk.cached // BLOCK_SIZE] - first, chunk.cached % BLOCK_SIZE)
            for row, chunk in zip(rows, chunks, strict=True)
        ]
        written = torch.tensor([slot for slot in slots if slot[1] >= 0], dtype=torch.long).view(-1, 3)
        self.rows = upload(torch.tensor(rows, dtype=torch.long))
        self.written = upload(written[:, 0].clone())
        self.written_rows = frozenset(written[:, 0].tolist())
        self.parts = []
        begin = 0
        for part in parts:
            longest = max(len(tables[i]) for i in part.among)
            table = torch.tensor(
                [[*tables[i], *[0] * (longest - len(tables[i]))] for i in part.among], dtype=torch.int32
            )
            metadata = AttentionMetadata.of(
                [1] * len(part.among), [tokens[i] - 1 for i in part.among], _resolved(table, part.slots, in_memory)
            )
            end = begin + sum(rows[i] in self.written_rows for i in part.among)
            blocks = _resolved(written[begin:end, 1], part.slots, in_memory)
            targets = lower.targets(torch.arange(begin, end), blocks, written[begin:end, 2])
            self.parts.append(HostPart(part.number, part.among, metadata, targets))
            begin = end


def _resolved(blocks: torch.Tensor, slots: torch.Tensor | None, in_memory: int) -> torch.Tensor:
    """The numbers of blocks with those on disk as they are staged, behind those in memory."""
    if slots is None:
        return blocks
    staged = in_memory + slots[(blocks - in_memory).clamp(min=0).long()]
    return torch.where(blocks < in_memory, blocks, staged.to(blocks.dtype))


def _tokens(chunk: Chunk, on: Callable[[int], bool]) -> int:
    """Of a chunk's sequence, up to its end, the tokens in blocks `on` one side."""
    total = chunk.cached + chunk.count
    table = chunk.block_table[: blocks_for(total)]
    return sum(min(BLOCK_SIZE, total - i * BLOCK_SIZE) for i, block in enumerate(table) if on(block))


@dataclass(frozen=True)
class HostAttentionTask:
    """A layer's host attention that runs: its output and log-sum-exps, `state`, are merged into the device's.

    The device's kernel writes its own log-sum-exps to `lse` [tokens, heads].
    """

    rows: torch.Tensor
    lse: torch.Tensor
    state: Future[tuple[torch.Tensor, torch.Tensor]]
    device: Accelerator
    merge: RowMerger

    def merge_into(self, output: torch.Tensor) -> None:
        """Makes the device's `output` [tokens, heads, dim] whole, in place."""
        host, host_lse = (self.device.upload(tensor) for tensor in self.state.result())
        self.merge(output, self.device.record_stream(self.lse), self.rows, host, host_lse)


class HostAttention:
    """Attends by the host's `kernel` to `blocks`, whose keys and values `quantizer` packs and `writer` stores, in a
    thread of its own; to those on disk, if there are any, where `on_disk` stages them. `merge`: on the device."""

    def __init__(
        self,
        blocks: LowerBlocks,
        kernel: AttentionKernel,
        quantizer: Quantizer,
        writer: RowWriter,
        merge: RowMerger,
        device: Accelerator,
        timeline: Timeline,
        on_disk: DiskBlocks | None = None,
    ) -> None:
        #: All blocks that are not on the device.
        self.blocks = blocks
        self._writer = writer
        self._merge = merge
        self._kernel = kernel
        self._quantizer = quantizer
        self._device = device
        self._timeline = timeline
        self._disk = on_disk
        self._parts: Sequence[Sequence[StagedPart]] = ()  # by batch of the pass
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-attention")

    def begin(self, batches: Sequence[Sequence[Chunk]], first: int) -> None:
        """Begins a pass, in whose batches these chunks attend here; their blocks have numbers from `first` on."""
        if self._disk is None:
            self._parts = [[StagedPart(0, range(len(batch)))] for batch in batches]
            return
        first += self.blocks.in_memory
        moved: list[tuple[set[int], set[int]]] = []
        among: list[list[range]] = []
        for batch in batches:
            filled = [{b - first for b in filled_blocks(c) if b >= first} for c in batch]
            written = [{b - first for b in written_blocks(c) if b >= first} for c in batch]
            needs = [a | b for a, b in zip(filled, written, strict=True)]
            among.append(divided(needs, self._disk.slots) if batch else [])
            for part in among[-1]:
                moved.append((union(filled, part), union(written, part)))
        slots = self._disk.start(moved)
        numbers = itertools.count()
        self._parts = [[StagedPart(n := next(numbers), part, slots[n]) for part in parts] for parts in among]

    def parts(self, batch: int) -> Sequence[StagedPart]:
        """The parts of a batch's chunks."""
        return self._parts[batch]

    @property
    def bytes_read(self) -> int:
        """Bytes of blocks that were read from disk to be attended to here."""
        return 0 if self._disk is None else self._disk.bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes of blocks that were written back."""
        return 0 if self._disk is None else self._disk.bytes_written

    def settle(self) -> None:
        """Waits for what a pass that failed has launched."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.shutdown()

    def launch(
        self, chunks: HostChunks, layer: int, query: torch.Tensor, new: Sequence[torch.Tensor], spec: AttentionSpec
    ) -> HostAttentionTask:
        """Starts with a batch's operands on the device: query [heads, tokens, dim], `new` keys and values alike."""
        operands = [query[:, chunks.rows], *(values[:, chunks.written] for values in new)]
        fetched, there = self._device.fetch(*operands)
        without_sinks = replace(spec, sinks=None)  # they count once, on the device

        @torch.inference_mode()
        def attend() -> tuple[torch.Tensor, torch.Tensor]:
            there.synchronize()
            began = time.perf_counter()
            host_query, *host_new = fetched
            keys, values = (self._quantizer.pack(rows.transpose(0, 1)) for rows in host_new)
            host_lse = torch.empty(host_query.shape[1], host_query.shape[0])
            outputs = []
            for part in chunks.parts:
                blocks: HostBlocks = self.blocks.host_layer(layer)
                if self._disk is not None:
                    blocks = self.blocks.with_staged(layer, self._disk.staged(layer, part.number))
                for piece, target in part.targets:
                    self._writer(blocks.piece(piece), target, keys, values)
                of_part = slice(part.among.start, part.among.stop)
                outputs.append(
                    self._kernel(host_query[:, of_part], blocks, part.metadata, without_sinks, host_lse[of_part])
                )
                if self._disk is not None:
                    self._disk.done(layer, part.number)
            self._timeline.add("host attention", f"layer {layer}", began, time.perf_counter())
            return torch.cat(outputs) if len(outputs) > 1 else outputs[0], host_lse

        lse = torch.empty(query.shape[1], query.shape[0], device=query.device)
        return HostAttentionTask(chunks.rows, lse, self._thread.submit(attend), self._device, self._merge)
