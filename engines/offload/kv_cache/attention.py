"""Attention of a packed batch over the paged cache: each token sees its own sequence, up to itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from engines.offload.device.protocol import Device
from engines.offload.kernels import AttentionKernel, AttentionMetadata, Hadamard, unmoved
from engines.offload.kernels.attention_spec import AttentionSpec
from engines.offload.kernels.layer_blocks import Target
from engines.offload.kv_cache.host_attention import HostAttention, HostAttentionBatch, count
from engines.offload.kv_cache.paged_cache import PagedCache
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.timeline import Timeline

#: (what begins the work, and gives what ends it) -> the output
Aside = Callable[[Callable[[], Callable[[], torch.Tensor]]], torch.Tensor]


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence in a packed batch: `count` rows, after `cached` tokens, on `block_table`."""

    count: int
    cached: int
    block_table: Sequence[int]


class PackedAttention:
    """Appends the batch's keys and values to the cache, then attends by `kernel`.

    What is attended to is always what the cache holds, in its precision, whether it was computed in this pass or
    an earlier one: so a result does not depend on how a prompt was cut into passes. `value_topk`: see AttentionSpec.
    `aside` does the work, and may do it beside others'. `hadamard`: what keys and values go through before they are
    stored; see kernels/hadamard.py. `device`: where the batch is, or None for the host. `home`: attends to blocks in
    host memory, where single tokens see some.
    """

    def __init__(
        self,
        cache: PagedCache,
        segments: Sequence[Segment],
        kernel: AttentionKernel,
        timeline: Timeline,
        value_topk: float = 1.0,
        aside: Aside = lambda begin: begin()(),
        hadamard: Hadamard | None = None,
        device: Device | None = None,
        home: HostAttention | None = None,
    ) -> None:
        self._cache = cache
        self._value_topk = value_topk
        self._aside = aside
        self._hadamard = hadamard
        self._kernel = kernel
        self._timeline = timeline
        put = unmoved if device is None else device.upload
        self._device = device
        self._home = home
        self._part: HostAttentionBatch | None = None
        self._written_at_home: frozenset[int] = frozenset()
        seen = segments
        if home is not None and device is not None:
            seen = self._without_home(segments, cache, device)
        longest = max(1, *(len(s.block_table) for s in seen))
        table = torch.tensor([[*s.block_table, *[0] * (longest - len(s.block_table))] for s in seen], dtype=torch.int32)
        counts, before = [s.count for s in seen], [s.cached for s in seen]
        self._segments = AttentionMetadata.of(counts, before, cache.places(table), put)
        new = [(s, t) for s in segments for t in range(s.cached, s.cached + s.count)]
        places = [(row, s.block_table[t // BLOCK_SIZE], t % BLOCK_SIZE) for row, (s, t) in enumerate(new)]
        own = [place for place in places if place[0] not in self._written_at_home]
        tokens, blocks, offsets = torch.tensor(own, dtype=torch.long).view(-1, 3).unbind(1)
        self._targets = [
            Target(None if t.tokens is None else put(t.tokens), put(t.blocks), put(t.offsets), t.staged)
            for t in cache.targets(None if len(own) == len(places) else tokens, blocks, offsets)
        ]

    def _without_home(self, segments: Sequence[Segment], cache: PagedCache, device: Device) -> list[Segment]:
        """What the device attends to; of a single token that sees blocks at home the others, put one after the
        other."""
        found, part, row = [], [], 0
        for s in segments:
            total = s.cached + s.count
            if cache.attends_on_host(s.block_table, s.count):
                part.append((row, s.block_table, total))
                own = [block for block in s.block_table if block < cache.first_elsewhere]
                found.append(Segment(1, count(s.block_table, total, lambda p: p < cache.first_elsewhere) - 1, own))
            else:
                found.append(s)
            row += s.count
        if part:
            rows, blocks, totals = zip(*part, strict=True)
            self._part = HostAttentionBatch(rows, blocks, totals, cache.first_elsewhere, device)
            self._written_at_home = self._part.new_rows
        return found

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Query [heads, tokens, head_dim], key and value [kv_heads, tokens, head_dim]; returns [tokens, heads, dim]."""

        def begin() -> Callable[[], torch.Tensor]:
            blocks = self._cache.layer(layer)
            began = self._timeline.now()  # not before: what the cache waits for has a lane of its own
            hadamard = self._hadamard
            asking, *new = (hadamard(x) if hadamard else x for x in (query, key, value))
            if self._device is not None:
                asking = asking.to(query.dtype)  # as its matrix units take it
            with_own = None
            if self._home is not None and self._part is not None:
                with_own = self._home.begin(self._part, layer, asking, new, spec)
            self._cache.write(blocks, self._targets, *new)
            lse = None
            if with_own is not None:
                lse = torch.empty(query.shape[1], query.shape[0], device=query.device)
            out = self._kernel(asking, blocks, self._segments, replace(spec, value_topk=self._value_topk), lse)
            self._timeline.add("attention", f"layer {layer}", began, self._timeline.now())
            self._cache.leave(layer)
            finish = self._kept(out) if with_own is None or lse is None else with_own(out, lse)
            return finish if hadamard is None else lambda: hadamard(finish()).to(query.dtype)

        return self._aside(begin)  # until then the operands are held here

    def _kept(self, out: torch.Tensor) -> Callable[[], torch.Tensor]:
        device = self._device
        return lambda: out if device is None else device.keep(out)
