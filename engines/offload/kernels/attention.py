"""Attention over the paged cache: the compiled kernel, and the reference it is tested against."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from engines.offload.kernels.attention_spec import AttentionSpec, attend, attend_with_lse
from engines.offload.kernels.build import function
from engines.offload.kernels.layer_blocks import KVBlocks
from engines.offload.kernels.quantizer import Quantizer
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.memory.storage import Storage
from harness.api import ModelShape


def unmoved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself: where a host computes, nothing need be brought anywhere."""
    return tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """Who owns the rows of a packed batch, as the host knows it and as int32 tensors for kernels.

    Segment i has `counts[i]` rows, from `starts[i]` to `starts[i + 1]`, which follow `before[i]` others of its sequence
    (`cached`); their keys and values are on the blocks of row i of `table` [segments, max_blocks]. `put` brings a host
    tensor to where the others are.
    """

    counts: Sequence[int]
    before: Sequence[int]
    starts: torch.Tensor
    cached: torch.Tensor
    table: torch.Tensor
    put: Callable[[torch.Tensor], torch.Tensor]
    _tiles: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls,
        counts: Sequence[int],
        before: Sequence[int],
        table: torch.Tensor,
        put: Callable[[torch.Tensor], torch.Tensor] = unmoved,
    ) -> AttentionMetadata:
        """From what the host knows; `table` is int32 there."""
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        cached = torch.tensor(before, dtype=torch.int32)
        return cls(tuple(counts), tuple(before), put(starts), put(cached), put(table), put)

    def tiles(self, each: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The segment and the first row of every `each` rows, int32: made once for all layers of a pass."""
        if each not in self._tiles:
            places = [(i, first) for i, count in enumerate(self.counts) for first in range(0, count, each)]
            owner, first = self.put(torch.tensor(places, dtype=torch.int32).T.contiguous())
            self._tiles[each] = owner, first
        return self._tiles[each]


class AttentionKernel(Protocol):
    """Attention of a packed batch."""

    def __call__(
        self,
        query: torch.Tensor,
        blocks: KVBlocks,
        segments: AttentionMetadata,
        spec: AttentionSpec,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Query [heads, tokens, dim] to [tokens, heads, dim].

        `lse` [tokens, heads] float32 takes the logarithms of the sums that probabilities are of: see
        `merge_attention_states`.
        """
        ...


def merge_attention_states(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> torch.Tensor:
    """Attention to two parts of what is seen, [rows, heads, dim] and lse [rows, heads] each, as one.

    Source: FlashAttention (Dao et al. 2022), section 3.1, between blocks. One of two lse may be minus infinity.
    """
    top = torch.maximum(lse, other_lse)
    one, two = ((part - top).exp()[..., None] for part in (lse, other_lse))
    return ((out * one + other * two) / (one + two)).to(out.dtype)


def reference_attention(quantizer: Quantizer) -> AttentionKernel:
    """The definition, in torch, one segment at a time: by torch's fused attention where that can follow the spec."""

    def wide(stored: torch.Tensor, seen: int, like: torch.Tensor) -> torch.Tensor:
        """[n, kv_heads, block, ...] as values [kv_heads, seen, dim] of the query's dtype."""
        found = stored.transpose(0, 1).flatten(1, 2)[:, :seen]
        packed = stored.dtype == torch.uint8
        dtype = torch.float32 if packed else like.dtype
        out = torch.empty(found.shape[0] * seen, like.shape[2], dtype=dtype, device=like.device)
        quantizer.unpack(found.flatten(0, 1).contiguous(), out)
        return out.view(found.shape[0], seen, like.shape[2]).to(like.dtype)

    def attention(
        query: torch.Tensor,
        blocks: KVBlocks,
        segments: AttentionMetadata,
        spec: AttentionSpec,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads, tokens, dim = query.shape
        out = query.new_empty(tokens, heads, dim)
        start = 0
        for i, (first, count) in enumerate(zip(segments.before, segments.counts, strict=True)):
            own, seen = slice(start, start + count), first + count
            start += count
            keys, values = blocks.gather(segments.table[i].long()).unbind(1)
            operands = query[:, own], wide(keys, seen, query), wide(values, seen, query)
            if lse is None:
                attended = _attend(*operands, spec, first)
            else:
                attended, sums = attend_with_lse(*operands, spec, first)
                lse[own] = sums.T
            out[own] = attended.transpose(0, 1)
        return out

    return attention


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec, first: int
) -> torch.Tensor:
    if spec.softcap is not None or spec.sinks is not None or spec.value_topk < 1:
        return attend(query, key, value, spec, first)
    rows, seen = query.shape[1], key.shape[1]
    plain = not first and (spec.window is None or spec.window >= seen)
    return scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=None if plain else spec.visible(first, rows, seen, query.device),
        is_causal=plain,
        scale=spec.scale,
        enable_gqa=key.shape[0] != query.shape[0],
    )[0]


def compiled_attention(stored: Storage, cache: Path, threads: int) -> AttentionKernel:
    """The C++ kernel on `threads` threads, in float32 arithmetic whatever the cache and the queries are in.

    Raises NoCompilerError where it cannot be built.
    """
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    arguments = [pointer, number, number, pointer, number, *[pointer] * 4, *[number] * 4, small, number, number,
                 ctypes.c_float, ctypes.c_float, ctypes.c_double, pointer, small, number, small]  # fmt: skip
    assert BLOCK_SIZE % 8 == 0 and BLOCK_SIZE & (BLOCK_SIZE - 1) == 0  # the kernel takes eight rows at a time
    source, name = Path(__file__).with_name("csrc") / "attention.cpp", stored.name
    kernel = function(source, f"attend_{name}", arguments, cache, f"STORED_{name}")
    shift = _log2(stored.grain)

    def attention(
        query: torch.Tensor,
        blocks: KVBlocks,
        segments: AttentionMetadata,
        spec: AttentionSpec,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        wide = query.float()
        wide = wide if wide.stride(2) == 1 else wide.contiguous()
        heads, tokens, dim = query.shape
        _, _, kv_heads, block, width = blocks.rows.shape
        cached, starts, table = segments.cached, segments.starts, blocks.addresses(segments.table)
        assert all(t.is_contiguous() for t in (blocks.rows[:1], table, cached, starts))
        assert width * blocks.rows.itemsize == stored.row_bytes(dim)
        assert lse is None or (lse.is_contiguous() and lse.shape == (tokens, heads) and lse.dtype == torch.float32)
        out = wide.new_empty(tokens, heads, dim)
        kernel(
            wide.data_ptr(), wide.stride(0), wide.stride(1), table.data_ptr(),
            blocks.rows.stride(1) * blocks.rows.itemsize, cached.data_ptr(), starts.data_ptr(), out.data_ptr(),
            None if lse is None else lse.data_ptr(),
            len(cached), heads, kv_heads, dim, _log2(block), table.shape[1], spec.window or 0, spec.scale,
            spec.softcap or 0.0, spec.value_topk, None if spec.sinks is None else spec.sinks.data_ptr(), threads, width,
            shift,
        )  # fmt: skip
        return out.to(query.dtype)

    return attention


def _log2(number: int) -> int:
    return number.bit_length() - 1


def reference_memory(
    shape: ModelShape, longest: int, stored: Storage, compute_bytes: int, sparse: bool
) -> tuple[int, int]:
    """As `tiers.attention_memory`, for the reference: one sequence's keys and values as stored, in float32 and as
    attended to, scores, a mask, and for sparse values two orders of the scores."""
    values = shape.num_kv_heads * (stored.row_bytes(shape.head_dim) + shape.head_dim * (4 + compute_bytes))
    of_score = 3 * compute_bytes + (2 * 8 + compute_bytes if sparse else 0)  # a softmax, beside a copy with sinks
    scores = shape.num_heads // shape.num_kv_heads * of_score
    return longest * 2 * values, longest * (scores + compute_bytes + 2)
