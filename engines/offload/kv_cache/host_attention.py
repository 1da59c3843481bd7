"""Attention by the host to pages in host memory, while the device attends to the others and computes on.

Only queries and the new tokens' keys and values go down and what was attended to comes up, not the pages: FlexGen
(Sheng et al. 2023), section 4.1, "CPU computation", here with quantized pages too, and with the pages of one sequence
on both sides, whose parts are put together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from engines.offload.device.protocol import Device
from engines.offload.kernels import AttentionKernel, Codec, Segments, joined
from engines.offload.kernels.attention_spec import Rule
from engines.offload.kv_cache.host_blocks import HostPages
from engines.offload.memory.kv_blocks import PAGE_TOKENS
from engines.offload.timeline import Timeline

#: How far the device is and what makes it whole: attention's output [tokens, heads, dim].
Finish = Callable[[], torch.Tensor]


class HomePart:
    """Of a batch the tokens whose sequences have pages at home: row `rows[i]` is of `pages[i]`, its `totals[i]` th.

    Pages from `first` on are at home; the rows are one token each.
    """

    def __init__(
        self, rows: Sequence[int], pages: Sequence[Sequence[int]], totals: Sequence[int], first: int, device: Device
    ) -> None:
        at_home = [[p - first for p in own if p >= first] for own in pages]
        longest = max(map(len, at_home))
        table = torch.tensor([[*own, *[0] * (longest - len(own))] for own in at_home], dtype=torch.int32)
        counts = [count(own, total, lambda page: page >= first) for own, total in zip(pages, totals, strict=True)]
        self.segments = Segments.of([1] * len(rows), [n - 1 for n in counts], table)
        self.rows = device.upload(torch.tensor(rows, dtype=torch.long))
        new = [
            (row, own[(total - 1) // PAGE_TOKENS] - first, (total - 1) % PAGE_TOKENS)
            for row, own, total in zip(rows, pages, totals, strict=True)
        ]
        written = torch.tensor([place for place in new if place[1] >= 0], dtype=torch.long).view(-1, 3)
        self.new_rows = frozenset(written[:, 0].tolist())
        self.written = device.upload(written[:, 0].clone())
        self.pages, self.offsets = written[:, 1], written[:, 2]


def count(pages: Sequence[int], total: int, among: Callable[[int], bool]) -> int:
    """Of the first `total` tokens on `pages` those on pages `among` some."""
    return sum(min(PAGE_TOKENS, total - i * PAGE_TOKENS) for i, page in enumerate(pages[: -(-total // PAGE_TOKENS)])
               if among(page))  # fmt: skip


class HomeAttention:
    """Attends by the host's `kernel` to pages whose keys and values are stored by `codec`, in a thread of its own."""

    def __init__(
        self, home: HostPages, kernel: AttentionKernel, codec: Codec, device: Device, timeline: Timeline
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
        self, part: HomePart, layer: int, query: torch.Tensor, new: Sequence[torch.Tensor], rule: Rule
    ) -> Callable[[torch.Tensor, torch.Tensor], Finish]:
        """Starts with a batch's operands, on the device: query [heads, tokens, dim], `new` keys and values alike.

        What is returned takes the device's own part of the output, and its logs, and gives what puts the two together.
        """
        asked = [query[:, part.rows], *(values[:, part.written] for values in new)]
        below = [self._device.fetch(tensor) for tensor in asked]
        plain = replace(rule, sinks=None)  # they count once, on the device

        @torch.inference_mode()
        def attend() -> tuple[torch.Tensor, torch.Tensor]:
            for _, event in below:
                event.synchronize()
            began = time.perf_counter()
            asking, *written = (tensor for tensor, _ in below)
            pages = self._home.at_home(layer)
            for which, values in enumerate(written):
                pages.put(which, part.pages, part.offsets, self._codec.pack(values.transpose(0, 1)))
            logs = torch.empty(asking.shape[1], asking.shape[0])
            out = self._kernel(asking, pages, part.segments, plain, logs)
            self._timeline.add("host attention", f"layer {layer}", began, time.perf_counter())
            return out, logs

        found = self._thread.submit(attend)

        def with_own(own: torch.Tensor, own_logs: torch.Tensor) -> Finish:
            def finish() -> torch.Tensor:
                out, logs = (self._device.upload(tensor) for tensor in found.result())
                rows = part.rows
                whole = joined(self._device.keep(own)[rows], self._device.keep(own_logs)[rows], out.to(own.dtype), logs)
                return own.index_copy_(0, rows, whole)

            return finish

        return with_own
