"""Host attention: the CPU attends to KV blocks in host memory while the device attends to its own and computes on.

Queries and the new tokens' keys and values go down and outputs come up, never the blocks: FlexGen (Sheng et al. 2023),
section 4.1, "CPU computation", here for quantized blocks too, and for sequences with blocks on both sides, whose two
attention states are merged.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from engines.offload.device.protocol import Accelerator
from engines.offload.kernels import AttentionKernel, AttentionMetadata, AttentionSpec, Quantizer, merge_attention_states
from engines.offload.kv_cache.block_manager import Chunk
from engines.offload.kv_cache.lower_blocks import LowerBlocks
from engines.offload.memory.kv_blocks import BLOCK_SIZE, blocks_for
from engines.offload.timeline import Timeline


class HostChunks:
    """The chunks of a batch that host attention serves: single tokens, in rows `rows` of the batch.

    Blocks from `first` on are in host memory. `on_device`: of each chunk what the device attends to, as (new tokens,
    tokens before, block table). `written_rows`: rows whose keys and values belong to host blocks.
    """

    def __init__(
        self, rows: Sequence[int], chunks: Sequence[Chunk], first: int, upload: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        tables = [[block - first for block in chunk.block_table if block >= first] for chunk in chunks]
        longest = max(map(len, tables))
        block_table = torch.tensor([[*table, *[0] * (longest - len(table))] for table in tables], dtype=torch.int32)
        tokens = [_tokens(chunk, lambda block: block >= first) for chunk in chunks]
        self.metadata = AttentionMetadata.of([1] * len(rows), [n - 1 for n in tokens], block_table)
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
        self.blocks, self.offsets = written[:, 1], written[:, 2]


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

    def merge_into(self, output: torch.Tensor) -> torch.Tensor:
        """The device's `output` [tokens, heads, dim], made whole in place."""
        host, host_lse = (self.device.upload(tensor) for tensor in self.state.result())
        rows, lse = self.rows, self.device.keep(self.lse)
        whole = merge_attention_states(output[rows], lse[rows], host.to(output.dtype), host_lse)
        return output.index_copy_(0, rows, whole)


class HostAttention:
    """Attends by the host's `kernel` to `blocks` whose keys and values `quantizer` stores, in a thread of its own."""

    def __init__(
        self,
        blocks: LowerBlocks,
        kernel: AttentionKernel,
        quantizer: Quantizer,
        device: Accelerator,
        timeline: Timeline,
    ) -> None:
        self._blocks = blocks
        self._kernel = kernel
        self._quantizer = quantizer
        self._device = device
        self._timeline = timeline
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-attention")

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
        fetched = [self._device.fetch(tensor) for tensor in operands]
        without_sinks = replace(spec, sinks=None)  # they count once, on the device

        @torch.inference_mode()
        def attend() -> tuple[torch.Tensor, torch.Tensor]:
            for _, event in fetched:
                event.synchronize()
            began = time.perf_counter()
            host_query, *host_new = (tensor for tensor, _ in fetched)
            blocks = self._blocks.host_layer(layer)
            for which, values in enumerate(host_new):
                blocks.put(which, chunks.blocks, chunks.offsets, self._quantizer.pack(values.transpose(0, 1)))
            host_lse = torch.empty(host_query.shape[1], host_query.shape[0])
            output = self._kernel(host_query, blocks, chunks.metadata, without_sinks, host_lse)
            self._timeline.add("host attention", f"layer {layer}", began, time.perf_counter())
            return output, host_lse

        lse = torch.empty(query.shape[1], query.shape[0], device=query.device)
        return HostAttentionTask(chunks.rows, lse, self._thread.submit(attend), self._device)
