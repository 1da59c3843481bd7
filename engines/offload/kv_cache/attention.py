"""Attention of a packed batch over the paged cache: each token sees its own sequence, up to itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engines.offload.device.protocol import Device
from engines.offload.kernels import AttentionKernel, Segments, Turn, unmoved
from engines.offload.kernels.attention_spec import Rule
from engines.offload.kernels.layer_blocks import Target
from engines.offload.kv_cache.host_attention import HomeAttention, HomePart, count
from engines.offload.kv_cache.paged_cache import PagedCache
from engines.offload.memory.kv_blocks import PAGE_TOKENS
from engines.offload.timeline import Timeline

#: (what begins the work, and gives what ends it) -> the output
Aside = Callable[[Callable[[], Callable[[], torch.Tensor]]], torch.Tensor]


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
    kernels/rotation.py. `device`: where the batch is, or None for the host. `home`: attends to pages in host memory,
    where single tokens see some.
    """

    def __init__(
        self,
        cache: PagedCache,
        segments: Sequence[Segment],
        kernel: AttentionKernel,
        timeline: Timeline,
        keep: float = 1.0,
        aside: Aside = lambda begin: begin()(),
        turn: Turn | None = None,
        device: Device | None = None,
        home: HomeAttention | None = None,
    ) -> None:
        self._cache = cache
        self._keep = keep
        self._aside = aside
        self._turn = turn
        self._kernel = kernel
        self._timeline = timeline
        put = unmoved if device is None else device.upload
        self._device = device
        self._home = home
        self._part: HomePart | None = None
        self._written_at_home: frozenset[int] = frozenset()
        seen = segments
        if home is not None and device is not None:
            seen = self._without_home(segments, cache, device)
        longest = max(1, *(len(s.pages) for s in seen))
        table = torch.tensor([[*s.pages, *[0] * (longest - len(s.pages))] for s in seen], dtype=torch.int32)
        counts, before = [s.count for s in seen], [s.cached for s in seen]
        self._segments = Segments.of(counts, before, cache.places(table), put)
        new = [(s, t) for s in segments for t in range(s.cached, s.cached + s.count)]
        places = [(row, s.pages[t // PAGE_TOKENS], t % PAGE_TOKENS) for row, (s, t) in enumerate(new)]
        own = [place for place in places if place[0] not in self._written_at_home]
        tokens, pages, offsets = torch.tensor(own, dtype=torch.long).view(-1, 3).unbind(1)
        self._targets = [
            Target(None if t.tokens is None else put(t.tokens), put(t.pages), put(t.offsets), t.staged)
            for t in cache.targets(None if len(own) == len(places) else tokens, pages, offsets)
        ]

    def _without_home(self, segments: Sequence[Segment], cache: PagedCache, device: Device) -> list[Segment]:
        """What the device attends to; of a single token that sees pages at home the others, put one after the other."""
        found, part, row = [], [], 0
        for s in segments:
            total = s.cached + s.count
            if cache.is_seen_at_home(s.pages, s.count):
                part.append((row, s.pages, total))
                own = [page for page in s.pages if page < cache.first_elsewhere]
                found.append(Segment(1, count(s.pages, total, lambda p: p < cache.first_elsewhere) - 1, own))
            else:
                found.append(s)
            row += s.count
        if part:
            rows, pages, totals = zip(*part, strict=True)
            self._part = HomePart(rows, pages, totals, cache.first_elsewhere, device)
            self._written_at_home = self._part.new_rows
        return found

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Query [heads, tokens, head_dim], key and value [kv_heads, tokens, head_dim]; returns [tokens, heads, dim]."""

        def begin() -> Callable[[], torch.Tensor]:
            pages = self._cache.layer(layer)
            began = self._timeline.now()  # not before: what the cache waits for has a lane of its own
            turn = self._turn
            asking, *new = (turn(x) if turn else x for x in (query, key, value))
            if self._device is not None:
                asking = asking.to(query.dtype)  # as its matrix units take it
            with_own = None
            if self._home is not None and self._part is not None:
                with_own = self._home.begin(self._part, layer, asking, new, rule)
            self._cache.write(pages, self._targets, *new)
            logs = None
            if with_own is not None:
                logs = torch.empty(query.shape[1], query.shape[0], device=query.device)
            out = self._kernel(asking, pages, self._segments, replace(rule, keep=self._keep), logs)
            self._timeline.add("attention", f"layer {layer}", began, self._timeline.now())
            self._cache.leave(layer)
            finish = self._kept(out) if with_own is None or logs is None else with_own(out, logs)
            return finish if turn is None else lambda: turn(finish()).to(query.dtype)

        return self._aside(begin)  # until then the operands are held here

    def _kept(self, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        device = self._device
        return lambda: out if device is None else device.keep(out)
