"""Unpacks bfloat16 in twelve bits on a CUDA device, in Triton, to the same bits as panels.unpack12.

Triton's interpreter runs the same kernel on a CPU (TRITON_INTERPRET=1); so it is tested without a device.
"""

import torch
import triton
import triton.language as tl

from engines.offload.memory.storage import CHUNK, CHUNK_BYTES, PANEL


def unpack12(chunks: torch.Tensor, out: torch.Tensor) -> None:
    """Chunks uint8 [panels, chunks, CHUNK_BYTES] into a contiguous bfloat16 [rows, columns]."""
    rows, columns = out.shape
    assert chunks.shape == (-(-rows // PANEL), -(-columns // CHUNK), CHUNK_BYTES) and chunks.is_contiguous()
    assert out.is_contiguous() and out.dtype == torch.bfloat16
    _unpack12[chunks.shape[:2]](chunks, out.view(torch.int16), rows, columns, chunks.shape[1],
                                PANEL=PANEL, CHUNK=CHUNK, CHUNK_BYTES=CHUNK_BYTES)  # fmt: skip


@triton.jit
def _half(at):
    """The two bytes at `at`, which may be an odd address."""
    return tl.load(at).to(tl.int32) | tl.load(at + 1).to(tl.int32) << 8


@triton.jit
def _unpack12(
    chunks, out, rows, columns, width, PANEL: tl.constexpr, CHUNK: tl.constexpr, CHUNK_BYTES: tl.constexpr
):  # csrc/exact12.h defines a chunk
    panel, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    header = chunks + (panel * width + chunk) * CHUNK_BYTES
    exponents = header + 16
    i = tl.arange(0, PANEL * CHUNK)
    pair, in_pair = i // (2 * PANEL), i % (2 * PANEL)
    both = tl.load(exponents + pair // 2 * 2 * PANEL + in_pair).to(tl.int32)  # a byte has codes of two pairs of columns
    code = both >> (pair % 2 * 4) & 15
    rest = tl.load(exponents + PANEL * CHUNK // 2 + i).to(tl.int32)
    exponent = tl.where(code > 0, code + _half(header), 0)
    bits = rest & 0x7F | exponent << 7 | (rest & 0x80) << 8
    listed = tl.load(header + 2).to(tl.int32)
    for k in tl.static_range(3):
        bits = tl.where((i == _half(header + 4 + 4 * k)) & (listed > k), _half(header + 6 + 4 * k), bits)
    row, column = panel * PANEL + in_pair // 2, chunk * CHUNK + pair * 2 + in_pair % 2
    tl.store(out + row * columns + column, bits.to(tl.int16), mask=(row < rows) & (column < columns))
