"""Attention by the host to blocks in host memory, while the device attends to the others and computes on.

Only queries and the new tokens' keys and values go down and what was attended to comes up, not the blocks: FlexGen
(Sheng et al. 2023), section 4.1, "CPU computation", here with quantized blocks too, and with the blocks of one sequence
on both sides, whose parts are put together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from engines.offload.device.protocol import Device
from engines.offload.kernels import AttentionKernel, AttentionMetadata, Quantizer, merge_attention_states
from engines.offload.kernels.attention_spec import AttentionSpec
from engines.offload.kv_cache.host_blocks import HostBlocks
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.timeline import Timeline

#: How far the device is and what makes it whole: attention's output [tokens, heads, dim].
Finish = Callable[[], torch.Tensor]


class HostAttentionBatch:
    """Of a batch the tokens whose sequences have blocks at home: row `rows[i]` is of `blocks[i]`, its `totals[i]` th.

    Blocks from `first` on are at home; the rows are one token each.
    """

    def __init__(
        self, rows: Sequence[int], blocks: Sequence[Sequence[int]], totals: Sequence[int], first: int, device: Device
    ) -> None:
        at_home = [[p - first for p in own if p >= first] for own in blocks]
        longest = max(map(len, at_home))
        table = torch.tensor([[*own, *[0] * (longest - len(own))] for own in at_home], dtype=torch.int32)
        counts = [count(own, total, lambda block: block >= first) for own, total in zip(blocks, totals, strict=True)]
        self.segments = AttentionMetadata.of([1] * len(rows), [n - 1 for n in counts], table)
        self.rows = device.upload(torch.tensor(rows, dtype=torch.long))
        new = [
            (row, own[(total - 1) // BLOCK_SIZE] - first, (total - 1) % BLOCK_SIZE)
            for row, own, total in zip(rows, blocks, totals, strict=True)
        ]
        written = torch.tensor([place for place in new if place[1] >= 0], dtype=torch.long).view(-1, 3)
        self.new_rows = frozenset(written[:, 0].tolist())
        self.written = device.upload(written[:, 0].clone())
        self.blocks, self.offsets = written[:, 1], written[:, 2]


def count(blocks: Sequence[int], total: int, among: Callable[[int], bool]) -> int:
    """Of the first `total` tokens on `blocks` those on blocks `among` some."""
    return sum(min(BLOCK_SIZE, total - i * BLOCK_SIZE) for i, block in enumerate(blocks[: -(-total // BLOCK_SIZE)])
               if among(block))  # fmt: skip


class HostAttention:
    """Attends by the host's `kernel` to blocks whose keys and values are stored by `codec`, in a thread of its own."""

    def __init__(
        self, home: HostBlocks, kernel: AttentionKernel, codec: Quantizer, device: Device, timeline: Timeline
    ) -> None:
        self._home = home
        self._kernel = kernel
        self._codec = codec
        self._device = device
        self._timeline = timeline
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="home-attention")

    def settle(self) -> None:
        """Waits for what a pass that was broken off has begun."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.shutdown()

    def begin(
        self,
        part: HostAttentionBatch,
        layer: int,
        query: torch.Tensor,
        new: Sequence[torch.Tensor],
        spec: AttentionSpec,
    ) -> Callable[[torch.Tensor, torch.Tensor], Finish]:
        """Starts with a batch's operands, on the device: query [heads, tokens, dim], `new` keys and values alike.

        What is returned takes the device's own part of the output, and its lse, and gives what puts the two together.
        """
        asked = [query[:, part.rows], *(values[:, part.written] for values in new)]
        below = [self._device.fetch(tensor) for tensor in asked]
        plain = replace(spec, sinks=None)  # they count once, on the device

        @torch.inference_mode()
        def attend() -> tuple[torch.Tensor, torch.Tensor]:
            for _, event in below:
                event.synchronize()
            began = time.perf_counter()
            asking, *written = (tensor for tensor, _ in below)
            blocks = self._home.at_home(layer)
            for which, values in enumerate(written):
                blocks.put(which, part.blocks, part.offsets, self._codec.pack(values.transpose(0, 1)))
            lse = torch.empty(asking.shape[1], asking.shape[0])
            out = self._kernel(asking, blocks, part.segments, plain, lse)
            self._timeline.add("host attention", f"layer {layer}", began, time.perf_counter())
            return out, lse

        found = self._thread.submit(attend)

        def with_own(own: torch.Tensor, own_lse: torch.Tensor) -> Finish:
            def finish() -> torch.Tensor:
                out, lse = (self._device.upload(tensor) for tensor in found.result())
                rows = part.rows
                whole = merge_attention_states(
                    self._device.keep(own)[rows], self._device.keep(own_lse)[rows], out.to(own.dtype), lse
                )
                return own.index_copy_(0, rows, whole)

            return finish

        return with_own
