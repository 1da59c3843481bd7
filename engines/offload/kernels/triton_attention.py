"""Attention of a packed batch over the paged KV cache on a CUDA device, in Triton, for plain and packed blocks.

One kernel for prompts and decode tokens: a program takes a tile of one segment's tokens with the query heads of one
key/value head, and walks the blocks that they see with an online softmax. Where there are too few such tiles to fill
the device, as with one long sequence, several programs share the context of each and a second kernel merges what they
found. Sources: FlashAttention-2 (Dao 2023), section 3; PagedAttention (Kwon et al. 2023), section 4.1; Flash-Decoding
(Dao et al. 2023).
"""

from functools import cache

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
#: Programs for each multiprocessor that fill a device; and how many share a context at most, of so many tiles of keys
#: each at least: merging costs about as much as one.
_FULL, _MOST_PARTS, _LEAST_TILES = 2, 32, 4


def parts_of(context: int, keys: int, programs: int, wanted: int) -> int:
    """How many programs share a `context` of so many tokens, in tiles of `keys`: a power of two. Without sharing there
    are `programs`, and `wanted` fill the device."""
    parts = 1
    while 2 * parts <= min(_MOST_PARTS, context // (keys * _LEAST_TILES)) and parts * programs < wanted:
        parts *= 2
    return parts


@cache
def _wanted(device: torch.device) -> int:
    """Programs that fill a device."""
    if device.type != "cuda":
        return 1
    return _FULL * int(torch.cuda.get_device_properties(device).multi_processor_count)


def tile(dim: int, itemsize: int, heads: int, prompts: bool) -> dict[str, int]:
    """A program's tile sizes, for heads of `dim` columns of `itemsize` bytes, `heads` query heads a key/value head."""
    width = max(_LEAST, triton.next_power_of_2(dim))
    most = max(_LEAST, _MOST * _BYTES // max(_BYTES, width * itemsize))
    tokens = max(1, most // heads) if prompts else 1
    rows = max(_LEAST, triton.next_power_of_2(tokens * heads))
    return {"HEADS": heads, "TOKENS": tokens, "ROWS": rows, "KEYS": most, "DIM": dim, "WIDTH": width}


def triton_attention(stored: Storage, wanted: int | None = None) -> AttentionKernel:
    """The kernel for blocks that are `stored` so. It does not support value_topk < 1. `wanted`: programs that fill the
    device; None to ask it."""

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
        prompts = tokens > len(metadata.counts)
        sizes = tile(dim, query.itemsize, heads // kv_heads, prompts)
        segment, first = metadata.tiles(sizes["TOKENS"])
        parts, longest = 1, 1 + max(metadata.before)
        if not prompts:
            fill = _wanted(query.device) if wanted is None else wanted
            parts = parts_of(longest, sizes["KEYS"], len(segment) * kv_heads, fill)
        merged, merged_lse = torch.empty(tokens, heads, dim, dtype=query.dtype, device=query.device), lse
        out = merged
        if parts > 1:
            out = merged.new_empty(parts, tokens, heads, dim, dtype=torch.float32)
            lse = merged.new_empty(parts, tokens, heads, dtype=torch.float32)
        packed = (stored.code_bytes(dim), stored.groups(dim)) if isinstance(stored, Grouped) else (0, 0)
        _attend[(len(segment), kv_heads, parts)](
            query, query.stride(0), query.stride(1), query.stride(2), resident, staged, len(resident),
            resident.stride(0), staged.stride(0), resident.stride(1), resident.stride(2), resident.stride(3),
            metadata.starts, metadata.cached, metadata.block_table, metadata.block_table.stride(0), segment, first,
            spec.sinks if spec.sinks is not None else query, out, out.stride(-3), out.stride(-2), tokens,
            out if lse is None else lse, spec.scale, spec.softcap or 1.0, spec.window or 0, *packed,
            BLOCK=resident.shape[3], **sizes, STAGED=blocks.staged is not None, WINDOW=spec.window is not None,
            CAP=spec.softcap is not None, SINKS=spec.sinks is not None, LSE=lse is not None,
            BITS=stored.bits if isinstance(stored, Grouped) else 16,
            GROUP=stored.group if isinstance(stored, Grouped) else 0,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        if parts > 1:
            assert lse is not None
            _merge[(tokens, heads)](
                out, lse, merged, merged if merged_lse is None else merged_lse, tokens, heads, PARTS=parts, DIM=dim,
                WIDTH=triton.next_power_of_2(dim), LSE=merged_lse is not None,
            )  # fmt: skip
        return merged

    return attention


def triton_merge_rows(
    out: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """As merge.merge_rows, in one launch."""
    count, heads, dim = other.shape
    assert lse.is_contiguous() and other.is_contiguous() and other_lse.is_contiguous() and out.stride(2) == 1
    _merge_rows[(count, heads)](
        out, out.stride(0), out.stride(1), lse, rows, other, other_lse, heads, DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
    )  # fmt: skip


@triton.jit(do_not_specialize=["out_row", "out_head", "heads"])
def _merge_rows(
    out, out_row, out_head, lse, rows, other, other_lse, heads, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """One row of one head."""
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + place)
    column = tl.arange(0, WIDTH)
    own, others = tl.load(lse + row * heads + head), tl.load(other_lse + place * heads + head)
    largest = tl.maximum(own, others)
    weight, weight_of_other = tl.exp(own - largest), tl.exp(others - largest)
    at = out + row * out_row + head * out_head + column
    values = tl.load(at, mask=column < DIM, other=0).to(tl.float32)
    beside = tl.load(other + (place * heads + head) * DIM + column, mask=column < DIM, other=0).to(tl.float32)
    merged = (values * weight + beside * weight_of_other) / (weight + weight_of_other)
    tl.store(at, merged.to(out.dtype.element_ty), mask=column < DIM)


@triton.jit(do_not_specialize=["tokens", "heads"])
def _merge(
    partial, lse, out, out_lse, tokens, heads, PARTS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    LSE: tl.constexpr,
):  # fmt: skip
    """One row of one head: the sum of its parts [PARTS, tokens, heads, DIM], weighted by their log-sum-exps."""
    row = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    at = tl.arange(0, PARTS).to(tl.int64) * tokens * heads + row
    column = tl.arange(0, WIDTH)
    each = tl.load(lse + at)
    largest = tl.max(each, 0)
    weights = tl.exp(each - tl.where(largest == float("-inf"), 0.0, largest))  # a row that sees nothing: zeros
    total = tl.sum(weights, 0)
    values = tl.load(partial + at[:, None] * DIM + column[None, :], mask=column[None, :] < DIM, other=0)
    summed = tl.sum(values * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + row * DIM + column, summed.to(out.dtype.element_ty), mask=column < DIM)
    if LSE:
        tl.store(out_lse + row, tl.where(total == 0, float("-inf"), largest + tl.log(total)))


@triton.jit(do_not_specialize=["table_row", "resident_blocks", "window", "query_head", "query_row", "tokens"])
def _attend(  # noqa: PLR0915 (one loop, whose parts share a dozen values)
    query, query_head, query_row, query_column, resident, staged, resident_blocks, resident_block, staged_block,
    kv_value, kv_head, kv_token, starts, cached, table, table_row, segments, firsts, sinks, out, out_row, out_head,
    tokens, lse, scale, cap, window, code_bytes, groups,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STAGED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # query_head, resident_block, kv_token, ...: strides in elements
    group = tl.program_id(1)  # the key/value head
    part = tl.program_id(2)  # of the context
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
    share = tl.cdiv(tl.cdiv(tl.maximum(end - origin, 0), KEYS), tl.num_programs(2)) * KEYS
    origin += part * share
    stop = tl.minimum(end, origin + share)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # once: by the first part
        maximum = tl.load(sinks + head, mask=real & (part == 0), other=float("-inf")).to(tl.float32)
        total += tl.where(part == 0, 1.0, 0.0)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for near in range(origin, stop, KEYS):
        seen = near + tl.arange(0, KEYS)
        there = seen < stop
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
        visible = there[None, :] & (seen[None, :] <= position[:, None])
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
    row = part.to(tl.int64) * tokens + start + token
    if LSE:  # [parts, tokens, heads], where heads = key/value heads * HEADS
        at_lse = lse + row * (tl.num_programs(1) * HEADS) + head
        tl.store(at_lse, tl.where(total == 0, float("-inf"), maximum + tl.log(total)), mask=real)
    sums /= tl.where(total == 0, 1.0, total)[:, None]  # padding rows, and rows that see nothing
    to = out + row[:, None] * out_row + head[:, None] * out_head + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=real[:, None] & valid[None, :])


@triton.jit
def _load(place, column, inside, code_bytes, groups, dtype: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Keys or values at columns `column` of the rows at `place`, dequantized to `dtype`."""
    if BITS == 16:
        return tl.load(place + column, mask=inside, other=0).to(dtype)
    return values_at(place, column, inside, code_bytes, groups, BITS, GROUP).to(dtype)
