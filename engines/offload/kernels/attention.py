"""Attention over the paged KV cache: what a layer asks for, the kernels' interface, the host's compiled kernel."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from engines.offload.kernels.attention_scratch import log2
from engines.offload.kernels.build import CSRC, function
from engines.offload.kernels.layer_blocks import KVBlocks
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.memory.storage import Storage


def unmoved(tensor: torch.Tensor) -> torch.Tensor:
    """The upload of a host that computes itself: the tensor as it is."""
    return tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What attention does with a layer's scores.

    `window`: a token sees itself and the `window` - 1 tokens before it. `softcap` c: a score s becomes c * tanh(s / c).
    `sinks` [heads] float32: one extra score per head in the softmax's denominator, with no value (gpt-oss).
    `value_topk`: the fraction of visible values, rounded up, that a row takes, those of the largest probabilities
    (FlexGen, section 5, sparse attention). Unlike FlexGen's, they are then scaled up to the sum of all probabilities.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    value_topk: float = 1.0

    def visible(self, first: int, rows: int, seen: int, device: torch.device | None = None) -> torch.Tensor:
        """The mask bool [rows, seen]: which of `seen` tokens each of `rows` tokens from position `first` on sees."""
        mask = torch.ones(rows, seen, dtype=torch.bool, device=device).tril(first)
        return mask if self.window is None else mask.triu(first - self.window + 1)


@dataclass(frozen=True)
class AttentionMetadata:
    """The segments of a packed batch, each a run of tokens of one sequence: for the host, and as int32 for kernels.

    Segment i has `counts[i]` tokens, rows `starts[i]` to `starts[i + 1]` of the batch. They follow `before[i]` earlier
    tokens of the sequence (`cached` on the device), on the KV blocks of row i of `block_table` [segments, max_blocks].
    `upload` copies a host tensor to the device of the others.
    """

    counts: Sequence[int]
    before: Sequence[int]
    starts: torch.Tensor
    cached: torch.Tensor
    block_table: torch.Tensor
    upload: Callable[[torch.Tensor], torch.Tensor]
    _tiles: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, compare=False)
    _offsets: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls,
        counts: Sequence[int],
        before: Sequence[int],
        block_table: torch.Tensor,
        upload: Callable[[torch.Tensor], torch.Tensor] = unmoved,
    ) -> AttentionMetadata:
        """Uploads what the host knows; `block_table` is int32 in host memory."""
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        cached = torch.tensor(before, dtype=torch.int32)
        return cls(tuple(counts), tuple(before), upload(starts), upload(cached), upload(block_table), upload)

    def tiles(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cuts segments into tiles of `tokens` tokens: each tile's segment and first token, int32. Made once a pass."""
        if tokens not in self._tiles:
            tiles = [(i, first) for i, count in enumerate(self.counts) for first in range(0, count, tokens)]
            padded = tiles + [(0, 0)] * (-len(tiles) % 4)  # both begin at 16 bytes, as Triton compiles for
            both = self.upload(torch.tensor(padded, dtype=torch.int32).view(-1, 2).T.contiguous())
            self._tiles[tokens] = both[0, : len(tiles)], both[1, : len(tiles)]
        return self._tiles[tokens]

    def locate(self, blocks: KVBlocks) -> tuple[int, torch.Tensor]:
        """Where the blocks of `block_table` lie in host memory: an address, and how many bytes behind it, int64. The
        latter are made once a pass where all of a layer's blocks lie together."""
        if blocks.has_others:
            return 0, blocks.addresses(self.block_table)
        size = blocks.rows.stride(0) * blocks.rows.itemsize
        if size not in self._offsets:
            self._offsets[size] = self.block_table.long() * size
        return blocks.rows.data_ptr(), self._offsets[size]


class AttentionKernel(Protocol):
    """Attention of a packed batch over one layer's KV blocks."""

    def __call__(
        self,
        query: torch.Tensor,
        blocks: KVBlocks,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Query [heads, tokens, dim] to output [tokens, heads, dim].

        `lse` float32 [tokens, heads], if given, receives the log-sum-exps for `merge_attention_states`.
        """


def compiled_attention(stored: Storage, cache: Path, threads: int) -> AttentionKernel:
    """The C++ kernel on `threads` threads, in float32 arithmetic but for prompts in bfloat16.

    Prompts whose queries are bfloat16 are multiplied in it where the CPU has units for it (AVX512-BF16 or AMX). So
    rounded are their probabilities, as by FlashAttention, and keys and values of a quantized cache
    (csrc/prompt_attention.h). A cache in float32 or float16 is not.

    Raises NoCompilerError where it cannot be built; the kernel raises MemoryError.
    """
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    arguments = [pointer, *[number] * 3, pointer, number, *[pointer] * 4, *[number] * 4, small, number, number,
                 ctypes.c_float, ctypes.c_float, ctypes.c_double, pointer, small, small, number, small]  # fmt: skip
    assert BLOCK_SIZE % 8 == 0 and BLOCK_SIZE & (BLOCK_SIZE - 1) == 0  # the kernel takes eight rows at a time
    kernel = function(CSRC / "attention.cpp", f"attend_{stored.name}", arguments, cache, f"STORED_{stored.name}")
    kernel.restype = small
    log2_group = log2(stored.grain)

    def attention(
        query: torch.Tensor,
        blocks: KVBlocks,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        wide = query.float()
        wide = wide if wide.stride(2) == 1 else wide.contiguous()
        heads, tokens, dim = query.shape
        _, _, kv_heads, block, width = blocks.rows.shape
        cached, starts, (base, table) = metadata.cached, metadata.starts, metadata.locate(blocks)
        assert blocks.rows.stride()[1:] == (kv_heads * block * width, block * width, width, 1)
        assert all(t.is_contiguous() for t in (table, cached, starts))
        assert width * blocks.rows.itemsize == stored.row_bytes(dim)
        assert lse is None or (lse.is_contiguous() and lse.shape == (tokens, heads) and lse.dtype == torch.float32)
        out = wide.new_empty(tokens, heads, dim)
        no_memory = kernel(
            wide.data_ptr(), wide.stride(0), wide.stride(1), base, table.data_ptr(),
            blocks.rows.stride(1) * blocks.rows.itemsize, cached.data_ptr(), starts.data_ptr(), out.data_ptr(),
            None if lse is None else lse.data_ptr(),
            len(metadata.counts), heads, kv_heads, dim, log2(block), table.shape[1], spec.window or 0, spec.scale,
            spec.softcap or 0.0, spec.value_topk, None if spec.sinks is None else spec.sinks.data_ptr(),
            query.dtype == torch.bfloat16, threads, width, log2_group,
        )  # fmt: skip
        if no_memory:
            raise MemoryError(f"no memory for attention of {tokens} tokens, to up to {table.shape[1] * block} each")
        return out.to(query.dtype)

    return attention
