"""Attention of a packed batch over the paged cache on a CUDA device, in Triton: values one by one or packed rows.

One kernel for prompts and for single tokens: a program takes some rows of one segment and one key/value head, and goes
over the blocks they see with a running softmax. Sources: FlashAttention-2 (Dao 2023), section 3; PagedAttention (Kwon
et al. 2023), section 4.1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engines.offload.kernels.attention import AttentionKernel, AttentionMetadata
from engines.offload.kernels.attention_spec import AttentionSpec
from engines.offload.kernels.layer_blocks import KVBlocks, LayerBlocks
from engines.offload.kernels.triton_quantizer import values_at
from engines.offload.memory.storage import Grouped, Storage

#: Rows of queries that a program multiplies, as many cached tokens at a time, and the least that matrix units take: of
#: 256 bytes each as many as 64 KiB of shared memory hold (a T4), of wider ones fewer.
_MOST, _LEAST, _BYTES = 64, 16, 256


def tile(dim: int, itemsize: int, group: int, prompts: bool) -> dict[str, int]:
    """What a program takes on: heads of `dim` columns of `itemsize` bytes, `group` to a key/value head."""
    width = max(_LEAST, triton.next_power_of_2(dim))
    most = max(_LEAST, _MOST * _BYTES // max(_BYTES, width * itemsize))
    each = max(1, most // group) if prompts else 1
    rows = max(_LEAST, triton.next_power_of_2(each * group))
    return {"GROUP": group, "EACH": each, "ROWS": rows, "TOKENS": most, "DIM": dim, "WIDTH": width}


def triton_attention(stored: Storage) -> AttentionKernel:
    """The kernel for blocks that are `stored` so; specs that take a part of the values are not for it."""

    def attention(
        query: torch.Tensor,
        blocks: KVBlocks,
        segments: AttentionMetadata,
        spec: AttentionSpec,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert spec.value_topk >= 1 and isinstance(blocks, LayerBlocks)
        heads, tokens, dim = query.shape
        rows, staged = blocks.rows, blocks.rows if blocks.staged is None else blocks.staged
        kv_heads = rows.shape[2]
        group = heads // kv_heads
        sizes = tile(dim, query.itemsize, group, tokens > len(segments.counts))
        owner, first = segments.tiles(sizes["EACH"])
        out = torch.empty(tokens, heads, dim, dtype=query.dtype, device=query.device)
        packed = (stored.code_bytes(dim), stored.groups(dim)) if isinstance(stored, Grouped) else (0, 0)
        _attend[(len(owner), kv_heads)](
            query, query.stride(0), query.stride(1), query.stride(2), rows, staged, len(rows), rows.stride(0),
            staged.stride(0), rows.stride(1), rows.stride(2), rows.stride(3), segments.starts, segments.cached,
            segments.table, segments.table.stride(0), owner, first, spec.sinks if spec.sinks is not None else query,
            out, out.stride(0), out.stride(1), out if lse is None else lse,
            spec.scale, spec.softcap or 1.0, spec.window or 0, *packed,
            PAGE=rows.shape[3], **sizes, STAGED=blocks.staged is not None, WINDOW=spec.window is not None,
            CAP=spec.softcap is not None, SINKS=spec.sinks is not None, LSE=lse is not None,
            BITS=stored.bits if isinstance(stored, Grouped) else 16,
            VALUES=stored.group if isinstance(stored, Grouped) else 0,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        return out

    return attention


@triton.jit(do_not_specialize=["table_row", "own", "window", "query_head", "query_row"])
def _attend(  # noqa: PLR0915 (one loop, whose parts share a dozen values)
    query, query_head, query_row, query_column, rows, staged, own, row_block, staged_block, row_which, row_head,
    row_token, starts, cached, table, table_row, owner, first, sinks, out, out_row, out_head, lse, scale, cap, window,
    code_bytes, groups,
    GROUP: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, STAGED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    segment = tl.load(owner + tl.program_id(0))
    begin = tl.load(first + tl.program_id(0))
    start = tl.load(starts + segment)
    count = tl.load(starts + segment + 1) - start
    before = tl.load(cached + segment)
    index = tl.arange(0, ROWS)
    token = begin + index // GROUP  # of the segment's new ones
    head = kv_head * GROUP + index % GROUP
    real = (index < EACH * GROUP) & (token < count)
    column = tl.arange(0, WIDTH)
    valid = column < DIM
    at = query + head[:, None].to(tl.int64) * query_head + (start + token)[:, None].to(tl.int64) * query_row
    asking = tl.load(at + column[None, :] * query_column, mask=real[:, None] & valid[None, :], other=0)
    position = before + token
    end = before + tl.minimum(begin + EACH, count)
    origin = 0
    if WINDOW:
        origin = tl.maximum(0, before + begin - window + 1) // TOKENS * TOKENS
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        most = tl.load(sinks + head, mask=real, other=0).to(tl.float32)
        total += 1.0
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for near in range(origin, end, TOKENS):
        seen = near + tl.arange(0, TOKENS)
        there = seen < end
        block = tl.load(table + segment.to(tl.int64) * table_row + seen // PAGE, mask=there, other=0).to(tl.int64)
        place = rows + block * row_block
        if STAGED:
            place = tl.where(block < own, place, staged + (block - own) * staged_block)
        place += kv_head * row_head + seen % PAGE * row_token
        keys = _wide(place[None, :], column[:, None], there[None, :] & valid[:, None], code_bytes, groups, asking.dtype,
                     BITS, VALUES)  # fmt: skip
        scores = tl.dot(asking, keys, input_precision=PRECISION) * scale
        if CAP:
            scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)  # tanh
        visible = seen[None, :] <= position[:, None]
        if WINDOW:
            visible &= seen[None, :] > position[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        safe = tl.where(larger == float("-inf"), 0.0, larger)  # nothing seen yet
        probabilities = tl.exp(scores - safe[:, None])
        kept = tl.exp(most - safe)
        values = _wide(place[:, None] + row_which, column[None, :], there[:, None] & valid[None, :], code_bytes, groups,
                       asking.dtype, BITS, VALUES)  # fmt: skip
        sums = sums * kept[:, None] + tl.dot(probabilities.to(asking.dtype), values, input_precision=PRECISION)
        total = total * kept + tl.sum(probabilities, 1)
        most = larger
    if LSE:  # as many heads a token as there are programs' groups
        at_lse = lse + (start + token) * (tl.num_programs(1) * GROUP) + head
        tl.store(at_lse, tl.where(total == 0, float("-inf"), most + tl.log(total)), mask=real)
    sums /= tl.where(total == 0, 1.0, total)[:, None]  # rows that are not real, or see nothing
    to = out + (start + token)[:, None].to(tl.int64) * out_row + head[:, None] * out_head + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=real[:, None] & valid[None, :])


@triton.jit
def _wide(place, column, inside, code_bytes, groups, dtype: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr):
    """Keys or values at `column` of the rows at `place`, as they are multiplied."""
    if BITS == 16:
        return tl.load(place + column, mask=inside, other=0).to(dtype)
    return values_at(place, column, inside, code_bytes, groups, BITS, VALUES).to(dtype)
