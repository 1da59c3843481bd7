"""Attention over the paged cache: the compiled kernel, and the reference it is tested against."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from engines.offload.kernels.build import by_dtype
from engines.offload.rule import Rule, attend
from harness.api import ModelShape

#: As in attention.cpp: rows whose scores are held together, and columns of a panel.
_BLOCK, _WIDTH = 48, 16


@dataclass(frozen=True)
class Segments:
    """Who owns the rows of a packed batch, as int32 tensors.

    Segment i has rows `starts[i]` to `starts[i + 1]`, which follow `cached[i]` others of its sequence; their keys and
    values are on the pages of row i of `table` [segments, max_pages].
    """

    starts: torch.Tensor
    cached: torch.Tensor
    table: torch.Tensor


#: (query [heads, tokens, dim], keys, values [pages, kv_heads, page, dim], segments, rule) -> [tokens, heads, dim]
AttentionKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segments, Rule], torch.Tensor]


def reference_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segments: Segments, rule: Rule
) -> torch.Tensor:
    """The definition, in torch, one segment at a time: by torch's fused attention where that can follow the rule."""
    heads, tokens, dim = query.shape
    out = query.new_empty(tokens, heads, dim)
    starts: Sequence[int] = segments.starts.tolist()
    for i, first in enumerate(segments.cached.tolist()):
        rows = slice(starts[i], starts[i + 1])
        seen = first + starts[i + 1] - starts[i]
        pages = segments.table[i].long()
        k, v = (c[pages].transpose(0, 1).flatten(1, 2)[:, :seen].to(query.dtype) for c in (keys, values))
        out[rows] = _attend(query[:, rows], k, v, rule, first).transpose(0, 1)
    return out


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule, first: int) -> torch.Tensor:
    if rule.softcap is not None or rule.sinks is not None:
        return attend(query, key, value, rule, first)
    rows, seen = query.shape[1], key.shape[1]
    plain = not first and (rule.window is None or rule.window >= seen)
    return scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=None if plain else rule.visible(first, rows, seen),
        is_causal=plain,
        scale=rule.scale,
        enable_gqa=key.shape[0] != query.shape[0],
    )[0]


def compiled_attention(cache: Path, threads: int) -> AttentionKernel:
    """The C++ kernel on `threads` threads, in float32 arithmetic whatever the cache and the queries are in.

    Raises NoCompilerError where it cannot be built.
    """
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    arguments = [pointer, number, number, *[pointer] * 6, *[number] * 7,
                 ctypes.c_float, ctypes.c_float, pointer, ctypes.c_int]  # fmt: skip
    functions = by_dtype(Path(__file__).with_name("attention.cpp"), "attend", arguments, cache)

    def attention(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segments: Segments, rule: Rule
    ) -> torch.Tensor:
        wide = query.float()
        wide = wide if wide.stride(2) == 1 else wide.contiguous()
        heads, tokens, dim = query.shape
        _, kv_heads, page, _ = keys.shape
        table, cached, starts = segments.table, segments.cached, segments.starts
        assert all(t.is_contiguous() for t in (keys, values, table, cached, starts))
        out = wide.new_empty(tokens, heads, dim)
        functions[keys.dtype](
            wide.data_ptr(), wide.stride(0), wide.stride(1), keys.data_ptr(), values.data_ptr(),
            table.data_ptr(), cached.data_ptr(), starts.data_ptr(), out.data_ptr(),
            len(cached), heads, kv_heads, dim, page, table.shape[1], rule.window or 0, rule.scale, rule.softcap or 0.0,
            None if rule.sinks is None else rule.sinks.data_ptr(), threads,
        )  # fmt: skip
        return out.to(query.dtype)

    return attention


def compiled_memory(shape: ModelShape, longest: int, threads: int) -> tuple[int, int]:
    """Bytes that the compiled kernel holds beside its operands, and for each prompt row of a pass.

    For sequences of `longest` tokens.
    """
    return threads * 4 * longest * (2 * -(-shape.head_dim // _WIDTH) * _WIDTH + _BLOCK), 0


def reference_memory(shape: ModelShape, longest: int, stored_bytes: int, compute_bytes: int) -> tuple[int, int]:
    """As `compiled_memory`, for the reference: one sequence's keys and values as attended to, scores and a mask."""
    gathered = longest * 2 * shape.num_kv_heads * shape.head_dim * (stored_bytes + compute_bytes)
    scores = 3 * shape.num_heads // shape.num_kv_heads * compute_bytes  # and their softmax, beside a copy with sinks
    return gathered, longest * (scores + compute_bytes + 2)
