"""The quantizer of a CUDA device, in Triton: packs and unpacks to the same bits as quantize.py.

Triton's interpreter runs the same kernels on a CPU (TRITON_INTERPRET=1); so they are tested without a device.
"""

import torch
import triton
import triton.language as tl

from engines.offload.memory.storage import Grouped

#: Columns that one program unpacks.
_TILE = 1024
_HALF_MAX = 65504.0


def unpack(packed: torch.Tensor, out: torch.Tensor, stored: Grouped) -> None:
    """Packed rows uint8 [rows, row_bytes] into a contiguous [rows, columns], rounded once to the dtype of `out`."""
    rows, columns = out.shape
    assert packed.shape == (rows, stored.row_bytes(columns)) and packed.is_contiguous() and out.is_contiguous()
    if rows:
        grid = (rows, triton.cdiv(columns, _TILE))  # CUDA limits the second dimension to 65535
        tile = min(_TILE, triton.next_power_of_2(columns))
        _unpack[grid](packed, out, columns, packed.shape[1], stored.code_bytes(columns), stored.groups(columns),
                      BITS=stored.bits, GROUP=stored.group, TILE=tile)  # fmt: skip


def pack(x: torch.Tensor, stored: Grouped) -> torch.Tensor:
    """Float rows [..., columns] as packed rows uint8 [..., row_bytes]."""
    columns, width = x.shape[-1], stored.row_bytes(x.shape[-1])
    x = x.contiguous()
    packed = torch.empty(*x.shape[:-1], width, dtype=torch.uint8, device=x.device)
    if x.numel():
        grid = (x.numel() // columns, stored.groups(columns))
        _pack[grid](x, packed, columns, width, stored.code_bytes(columns), stored.groups(columns),
                    BITS=stored.bits, GROUP=stored.group, HALF_MAX=_HALF_MAX)  # fmt: skip
    return packed


@triton.jit
def codes_at(row, column, inside, BITS: tl.constexpr):
    """The codes, int32, at columns `column` of the packed rows that begin at `row`."""
    bit = column % 8 * BITS
    byte = row + column // 8 * BITS + bit // 8
    word = tl.load(byte, mask=inside, other=0).to(tl.int32)
    if BITS == 3:  # a code may straddle two bytes
        word |= tl.load(byte + 1, mask=inside & (bit % 8 > 5), other=0).to(tl.int32) << 8
    return word >> bit % 8 & (1 << BITS) - 1


@triton.jit
def halves_at(start, index, inside):
    """The float16 values at `index` of an array at `start`, which may be an odd address, as float32."""
    low = tl.load(start + 2 * index, mask=inside, other=0).to(tl.uint16)
    high = tl.load(start + 2 * index + 1, mask=inside, other=0).to(tl.uint16)
    return (low | high << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def values_at(row, column, inside, code_bytes, groups, BITS: tl.constexpr, GROUP: tl.constexpr):
    """The values, float32, at columns `column` of the packed rows that begin at `row`."""
    code = codes_at(row, column, inside, BITS).to(tl.float32)
    scale = halves_at(row + code_bytes, column // GROUP, inside)
    minimum = halves_at(row + code_bytes + 2 * groups, column // GROUP, inside)
    return minimum + code * scale


@triton.jit
def _unpack(
    packed, out, columns, width, code_bytes, groups, BITS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < columns
    values = values_at(packed + row * width, column, inside, code_bytes, groups, BITS, GROUP)
    tl.store(out + row * columns + column, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _round(x):
    """Rounds float64 to the nearest integer, ties to even."""
    up = tl.floor(x + 0.5)
    odd = up - 2.0 * tl.floor(up / 2.0)
    return tl.where((up - x == 0.5) & (odd == 1.0), up - 1.0, up)


@triton.jit
def _pack(
    x, packed, columns, width, code_bytes, groups, BITS: tl.constexpr, GROUP: tl.constexpr, HALF_MAX: tl.constexpr
):
    group = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64)
    column = group * GROUP + tl.arange(0, GROUP)
    inside = column < columns
    value = tl.load(x + row * columns + column, mask=inside, other=0).to(tl.float64)
    least = tl.min(tl.where(inside, value, float("inf")), 0)
    most = tl.max(tl.where(inside, value, float("-inf")), 0)
    finite = tl.abs(value) < float("inf")  # false for NaN too
    broken = tl.max(tl.where(inside & (finite == 0), 1, 0), 0) == 1
    scale = tl.minimum(((most - least) / ((1 << BITS) - 1)).to(tl.float32), HALF_MAX).to(tl.float16)
    minimum = tl.minimum(tl.maximum(least.to(tl.float32) + 0.0, -HALF_MAX), HALF_MAX).to(tl.float16)
    scale = tl.where(broken, float("nan"), scale).to(tl.float16)
    minimum = tl.where(broken, float("nan"), minimum).to(tl.float16)
    flat = broken | (scale == 0)
    code = _round((value - minimum.to(tl.float64)) / tl.where(flat, 1.0, scale.to(tl.float64)))
    code = tl.where(inside & (flat == 0), tl.minimum(tl.maximum(code, 0.0), (1 << BITS) - 1.0), 0.0)
    place = tl.arange(0, 8)
    words = tl.sum(tl.reshape(code.to(tl.uint64), (GROUP // 8, 8)) << (place * BITS).to(tl.uint64)[None, :], 1)
    eighth = group * (GROUP // 8) + tl.arange(0, GROUP // 8)
    target = packed + row * width
    for i in tl.static_range(BITS):
        byte = (words >> (8 * i)) & 255
        tl.store(target + eighth * BITS + i, byte.to(tl.uint8), mask=eighth * 8 < columns)
    for which in tl.static_range(2):
        half = (scale if which == 0 else minimum).to(tl.uint16, bitcast=True)
        start = target + code_bytes + 2 * (which * groups + group)
        tl.store(start, (half & 255).to(tl.uint8))
        tl.store(start + 1, (half >> 8).to(tl.uint8))
