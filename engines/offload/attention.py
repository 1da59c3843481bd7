"""Attention of a packed batch over the paged cache: each token sees its own sequence, up to itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engines.offload.device import Device
from engines.offload.kernels import AttentionKernel, Segments, Turn, unmoved
from engines.offload.kv_cache import PagedCache
from engines.offload.layer_pages import Target
from engines.offload.pages import PAGE_TOKENS
from engines.offload.rule import Rule
from engines.offload.timeline import Timeline

#: (work, its operands) -> what it gives
Aside = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence in a packed batch: `count` rows, after `cached` tokens, on `pages`."""

    count: int
    cached: int
    pages: Sequence[int]


class PackedAttention:
    """Appends the batch's keys and values to the cache, then attends by `kernel`.

    What is attended to is always what the cache holds, in its precision, whether it was computed in this pass or
    an earlier one: so a result does not depend on how a prompt was cut into passes. `keep`: see Rule. `aside` does the
    work, and may do it beside others'. `turn`: what keys and values go through before they are stored; see
    kernels/rotation.py. `device`: where the batch is, or None for the host.
    """

    def __init__(
        self,
        cache: PagedCache,
        segments: Sequence[Segment],
        kernel: AttentionKernel,
        timeline: Timeline,
        keep: float = 1.0,
        aside: Aside = lambda work, *operands: work(),
        turn: Turn | None = None,
        device: Device | None = None,
    ) -> None:
        self._cache = cache
        self._keep = keep
        self._aside = aside
        self._turn = turn
        self._kernel = kernel
        self._timeline = timeline
        put = unmoved if device is None else device.upload
        longest = max(len(s.pages) for s in segments)
        table = torch.tensor([[*s.pages, *[0] * (longest - len(s.pages))] for s in segments], dtype=torch.int32)
        counts, before = [s.count for s in segments], [s.cached for s in segments]
        self._segments = Segments.of(counts, before, cache.places(table), put)
        written = [
            (s.pages[t // PAGE_TOKENS], t % PAGE_TOKENS) for s in segments for t in range(s.cached, s.cached + s.count)
        ]
        self._targets = [
            Target(None if t.tokens is None else put(t.tokens), put(t.pages), put(t.offsets), t.staged)
            for t in cache.targets(*torch.tensor(written, dtype=torch.long).unbind(1))
        ]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Query [heads, tokens, head_dim], key and value [kv_heads, tokens, head_dim]; returns [tokens, heads, dim]."""

        def work() -> torch.Tensor:
            pages = self._cache.layer(layer)
            began = self._timeline.now()  # not before: what the cache waits for has a lane of its own
            turn = self._turn
            new = (turn(key), turn(value)) if turn else (key, value)
            self._cache.write(pages, self._targets, *new)
            asking = turn(query) if turn else query
            out = self._kernel(asking, pages, self._segments, replace(rule, keep=self._keep))
            if turn:
                out = turn(out).to(query.dtype)
            self._timeline.add("attention", f"layer {layer}", began, self._timeline.now())
            self._cache.leave(layer)
            return out

        return self._aside(work, query, key, value)
