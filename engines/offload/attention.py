"""Attention of a packed batch over the paged cache: each token sees its own sequence, up to itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from engines.offload.kernels import DecodeKernel
from engines.offload.kv_cache import PagedCache
from engines.offload.pages import PAGE_TOKENS
from engines.offload.rule import Rule, attend
from engines.offload.timeline import Timeline


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence in a packed batch: `count` rows, after `cached` tokens, on `pages`."""

    count: int
    cached: int
    pages: Sequence[int]


class PackedAttention:
    """Appends the batch's keys and values to the cache, then attends: single rows by the decode kernel, longer
    segments by `scaled_dot_product_attention`. Segments of one row must come first.

    What is attended to is always what the cache holds, in its precision, whether it was computed in this pass or
    an earlier one: so a result does not depend on how a prompt was cut into passes.
    """

    def __init__(
        self, cache: PagedCache, segments: Sequence[Segment], kernel: DecodeKernel, timeline: Timeline
    ) -> None:
        self._cache = cache
        self._kernel = kernel
        self._timeline = timeline
        singles = [s for s in segments if s.count == 1]
        assert all(s.count == 1 for s in segments[: len(singles)]), "single rows come first"
        self._decoding = len(singles)
        self._segments = segments[len(singles) :]
        longest = max((len(s.pages) for s in singles), default=0)
        padded = [[*s.pages, *[0] * (longest - len(s.pages))] for s in singles]
        self._table = torch.tensor(padded, dtype=torch.int32).view(len(singles), longest)
        self._lengths = torch.tensor([s.cached + 1 for s in singles], dtype=torch.int32)
        places = [(s.pages[t // PAGE_TOKENS], t % PAGE_TOKENS) for s in segments for t in _positions(s)]
        self._pages, self._offsets = torch.tensor(places, dtype=torch.long).view(-1, 2).unbind(1)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Query [heads, tokens, head_dim], key and value [kv_heads, tokens, head_dim]; returns [tokens, heads, dim]."""
        began = time.perf_counter()
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        key, value = key.to(keys.dtype), value.to(values.dtype)
        keys[self._pages, :, self._offsets] = key.transpose(0, 1)
        values[self._pages, :, self._offsets] = value.transpose(0, 1)
        heads, tokens, dim = query.shape
        out = query.new_empty(tokens, heads, dim)
        if self._decoding:
            rows = query[:, : self._decoding].transpose(0, 1).contiguous()
            out[: self._decoding] = self._kernel(rows, keys, values, self._table, self._lengths, rule)
        start = self._decoding
        for segment in self._segments:
            stop = start + segment.count
            if segment.cached:
                seen = segment.cached + segment.count
                k, v = _gather(keys, segment.pages, seen), _gather(values, segment.pages, seen)
            else:
                k, v = key[:, start:stop], value[:, start:stop]
            out[start:stop] = _attend(query[:, start:stop], k, v, rule, segment.cached).transpose(0, 1)
            start = stop
        self._timeline.add("attention", f"layer {layer}", began, time.perf_counter())
        return out


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule, first: int) -> torch.Tensor:
    """As `rule.attend`, by the fused kernel of torch where that can follow the rule."""
    if rule.softcap is not None or rule.sinks is not None:
        return attend(query, key, value, rule, first)
    rows, seen = query.shape[1], key.shape[1]
    plain = not first and (rule.window is None or rule.window >= seen)
    return scaled_dot_product_attention(
        query[None],
        key[None].to(query.dtype),
        value[None].to(query.dtype),
        attn_mask=None if plain else rule.visible(first, rows, seen),
        is_causal=plain,
        scale=rule.scale,
        enable_gqa=key.shape[0] != query.shape[0],
    )[0]


def _positions(segment: Segment) -> range:
    return range(segment.cached, segment.cached + segment.count)


def _gather(cache: torch.Tensor, pages: Sequence[int], tokens: int) -> torch.Tensor:
    """The first `tokens` entries of a sequence from one layer's cache: [kv_heads, tokens, head_dim]."""
    picked = cache[torch.tensor(pages)]
    count, heads, page, dim = picked.shape
    return picked.transpose(0, 1).reshape(heads, count * page, dim)[:, :tokens]
