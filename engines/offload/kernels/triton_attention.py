"""Attention of a packed batch over the paged KV cache on a CUDA device, in Triton, for plain and packed blocks.

One kernel for prompts and decode tokens: a program takes a tile of one segment's tokens with the query heads of one
key/value head, and walks the blocks that they see with an online softmax. Sources: FlashAttention-2 (Dao 2023), section
3; PagedAttention (Kwon et al. 2023), section 4.1.
"""

import torch
import triton
import triton.language as tl

from engines.offload.kernels.attention import AttentionKernel, AttentionMetadata, AttentionSpec
from engines.offload.kernels.layer_blocks import KVBlocks, LayerBlocks
from engines.offload.kernels.triton_quantizer import values_at
from engines.offload.memory.storage import Grouped, Storage

#: Query rows and cached tokens of a tile: at most `_MOST` rows of `_BYTES` bytes, which fill a T4's 64 KiB of shared
#: memory, of wider rows fewer; at least `_LEAST`, the smallest that tensor cores multiply.
_MOST, _LEAST, _BYTES = 64, 16, 256


def tile(dim: int, itemsize: int, heads: int, prompts: bool) -> dict[str, int]:
    """A program's tile sizes, for heads of `dim` columns of `itemsize` bytes, `heads` query heads a key/value head."""
    width = max(_LEAST, triton.next_power_of_2(dim))
    most = max(_LEAST, _MOST * _BYTES // max(_BYTES, width * itemsize))
    tokens = max(1, most // heads) if prompts else 1
    rows = max(_LEAST, triton.next_power_of_2(tokens * heads))
    return {"HEADS": heads, "TOKENS": tokens, "ROWS": rows, "KEYS": most, "DIM": dim, "WIDTH": width}


def triton_attention(stored: Storage) -> AttentionKernel:
    """The kernel for blocks that are `stored` so. It does not support value_topk < 1."""

    def attention(
        query: torch.Tensor,
        blocks: KVBlocks,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert spec.value_topk >= 1 and isinstance(blocks, LayerBlocks)
        heads, tokens, dim = query.shape
        resident, staged = blocks.rows, blocks.rows if blocks.staged is None else blocks.staged
        kv_heads = resident.shape[2]
        sizes = tile(dim, query.itemsize, heads // kv_heads, tokens > len(metadata.counts))
        segment, first = metadata.tiles(sizes["TOKENS"])
        out = torch.empty(tokens, heads, dim, dtype=query.dtype, device=query.device)
        packed = (stored.code_bytes(dim), stored.groups(dim)) if isinstance(stored, Grouped) else (0, 0)
        _attend[(len(segment), kv_heads)](
            query, query.stride(0), query.stride(1), query.stride(2), resident, staged, len(resident),
            resident.stride(0), staged.stride(0), resident.stride(1), resident.stride(2), resident.stride(3),
            metadata.starts, metadata.cached, metadata.block_table, metadata.block_table.stride(0), segment, first,
            spec.sinks if spec.sinks is not None else query, out, out.stride(0), out.stride(1),
            out if lse is None else lse, spec.scale, spec.softcap or 1.0, spec.window or 0, *packed,
            BLOCK=resident.shape[3], **sizes, STAGED=blocks.staged is not None, WINDOW=spec.window is not None,
            CAP=spec.softcap is not None, SINKS=spec.sinks is not None, LSE=lse is not None,
            BITS=stored.bits if isinstance(stored, Grouped) else 16,
            GROUP=stored.group if isinstance(stored, Grouped) else 0,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        return out

    return attention


@triton.jit(do_not_specialize=["table_row", "resident_blocks", "window", "query_head", "query_row"])
def _attend(  # noqa: PLR0915 (one loop, whose parts share a dozen values)
    query, query_head, query_row, query_column, resident, staged, resident_blocks, resident_block, staged_block,
    kv_value, kv_head, kv_token, starts, cached, table, table_row, segments, firsts, sinks, out, out_row, out_head, lse,
    scale, cap, window, code_bytes, groups,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # query_head, resident_block, kv_token, ...: strides in elements
    group = tl.program_id(1)  # the key/value head
    segment = tl.load(segments + tl.program_id(0))
    begin = tl.load(firsts + tl.program_id(0))
    start = tl.load(starts + segment)
    count = tl.load(starts + segment + 1) - start
    before = tl.load(cached + segment)
    index = tl.arange(0, ROWS)
    token = begin + index // HEADS  # of the segment's new tokens
    head = group * HEADS + index % HEADS
    real = (index < TOKENS * HEADS) & (token < count)
    column = tl.arange(0, WIDTH)
    valid = column < DIM
    at = query + head[:, None].to(tl.int64) * query_head + (start + token)[:, None].to(tl.int64) * query_row
    queries = tl.load(at + column[None, :] * query_column, mask=real[:, None] & valid[None, :], other=0)
    position = before + token
    end = before + tl.minimum(begin + TOKENS, count)
    origin = 0
    if WINDOW:
        origin = tl.maximum(0, before + begin - window + 1) // KEYS * KEYS
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        maximum = tl.load(sinks + head, mask=real, other=0).to(tl.float32)
        total += 1.0
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for near in range(origin, end, KEYS):
        seen = near + tl.arange(0, KEYS)
        there = seen < end
        block = tl.load(table + segment.to(tl.int64) * table_row + seen // BLOCK, mask=there, other=0).to(tl.int64)
        place = resident + block * resident_block
        if STAGED:
            place = tl.where(block < resident_blocks, place, staged + (block - resident_blocks) * staged_block)
        place += group * kv_head + seen % BLOCK * kv_token
        keys = _load(place[None, :], column[:, None], there[None, :] & valid[:, None], code_bytes, groups,
                     queries.dtype, BITS, GROUP)  # fmt: skip
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        if CAP:
            scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)  # tanh
        visible = seen[None, :] <= position[:, None]
        if WINDOW:
            visible &= seen[None, :] > position[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        larger = tl.maximum(maximum, tl.max(scores, 1))
        safe = tl.where(larger == float("-inf"), 0.0, larger)  # a row that has seen nothing yet
        probabilities = tl.exp(scores - safe[:, None])
        correction = tl.exp(maximum - safe)
        values = _load(place[:, None] + kv_value, column[None, :], there[:, None] & valid[None, :], code_bytes, groups,
                       queries.dtype, BITS, GROUP)  # fmt: skip
        sums = sums * correction[:, None] + tl.dot(probabilities.to(queries.dtype), values, input_precision=PRECISION)
        total = total * correction + tl.sum(probabilities, 1)
        maximum = larger
    if LSE:  # [tokens, heads], where heads = key/value heads * HEADS
        at_lse = lse + (start + token) * (tl.num_programs(1) * HEADS) + head
        tl.store(at_lse, tl.where(total == 0, float("-inf"), maximum + tl.log(total)), mask=real)
    sums /= tl.where(total == 0, 1.0, total)[:, None]  # padding rows, and rows that see nothing
    to = out + (start + token)[:, None].to(tl.int64) * out_row + head[:, None] * out_head + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=real[:, None] & valid[None, :])


@triton.jit
def _load(place, column, inside, code_bytes, groups, dtype: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Keys or values at columns `column` of the rows at `place`, dequantized to `dtype`."""
    if BITS == 16:
        return tl.load(place + column, mask=inside, other=0).to(dtype)
    return values_at(place, column, inside, code_bytes, groups, BITS, GROUP).to(dtype)
