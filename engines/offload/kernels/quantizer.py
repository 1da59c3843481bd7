"""Quantizers: values to what is stored and back, in C++, numba or torch; weights are packed with more care."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engines.offload.kernels import least_squares, panels, quantize
from engines.offload.kernels.build import CSRC, function
from engines.offload.memory.storage import CHUNK, CHUNK_BYTES, PANEL, Grouped, Panels, Plain, WeightStorage

#: Float rows [..., columns] to [..., columns] in the stored dtype, or to packed rows uint8 [..., row_bytes].
Pack = Callable[[torch.Tensor], torch.Tensor]
#: A weight's rows [rows, columns] to what is stored, or None where the storage cannot hold these values.
WeightPack = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class Quantizer:
    """Converts values to one storage and back, in every implementation to the same bits.

    `pack`: see Pack.
    `unpack`: stored rows [rows, ...] into a contiguous [rows, columns]; packed rows into float32.
    """

    pack: Pack
    unpack: Callable[[torch.Tensor, torch.Tensor], None]


def stored_view(raw: torch.Tensor, stored: WeightStorage, rows: int, columns: int) -> torch.Tensor:
    """The stored bytes uint8 [...] of a weight W[rows, columns], viewed as kernels and quantizers take it."""
    if isinstance(stored, Panels):
        if stored.exact12:
            return raw.view(-(-rows // PANEL), -(-columns // CHUNK), CHUNK_BYTES)
        if stored.grouped is not None:
            return raw.view(-(-rows // PANEL), stored.grouped.groups(columns), -1)
        return raw.view(torch.bfloat16).view(-1, -(-columns // 2), PANEL, 2)
    if isinstance(stored, Plain):
        return raw.view(getattr(torch, stored.dtype)).view(rows, columns)
    return raw.view(-1, stored.row_bytes(columns if stored.group_axis else rows))


def plain_quantizer(stored: Plain) -> Quantizer:
    """Casts to the stored dtype, and copies back."""
    dtype = getattr(torch, stored.dtype)

    def unpack(values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values)

    return Quantizer(lambda x: x.to(dtype), unpack)


def panel_pack(stored: Panels, pack: WeightPack | None) -> WeightPack:
    """Rows [rows, columns] to panels. `pack` quantizes rows; None where panels are not quantized."""
    if pack is None:
        return lambda x: panels.pack(x.bfloat16())

    def packed(x: torch.Tensor) -> torch.Tensor | None:
        rows = pack(x)
        return None if rows is None else panels.pack_groups(rows, x.shape[1], stored)

    return packed


def exact12_pack(cache: Path) -> WeightPack:
    """bfloat16 rows to chunks in twelve bits, uint8 [panels, chunks, CHUNK_BYTES]; None where exponents vary too much.
    Raises NoCompilerError where it cannot be built."""
    pack = function(CSRC / "panel_gemm.cpp", "pack_exact12", [ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p],
                    cache)  # fmt: skip
    pack.restype = ctypes.c_int

    def packed(x: torch.Tensor) -> torch.Tensor | None:
        plain = panels.pack(x.bfloat16())
        out = torch.empty(len(plain), -(-x.shape[1] // CHUNK), CHUNK_BYTES, dtype=torch.uint8)
        return out if pack(plain.data_ptr(), len(plain), plain.shape[1], out.data_ptr()) else None

    return packed


def reference_quantizer(stored: Grouped) -> Quantizer:
    """The reference of quantize.py, in torch."""

    def unpack(packed: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(quantize.unpack(packed, out.shape[1], stored))

    return Quantizer(lambda x: quantize.pack(x, stored), unpack)


def numba_quantizer(stored: Grouped, threads: int) -> Quantizer:
    """Compiled by numba, on `threads` threads. Raises ImportError where numba is not installed."""
    from engines.offload.kernels import numba_quantizer as compiled  # numba is optional

    return Quantizer(
        lambda x: compiled.pack(x, stored, threads), lambda packed, out: compiled.unpack(packed, out, stored, threads)
    )


def compiled_quantizer(stored: Grouped, cache: Path, threads: int) -> Quantizer:
    """The C++ kernels on `threads` threads. Raises NoCompilerError where they cannot be built."""
    unpack_rows = _function("unpack", stored, cache)

    def unpack(packed: torch.Tensor, out: torch.Tensor) -> None:
        rows, columns = out.shape
        assert packed.shape == (rows, stored.row_bytes(columns))
        assert packed.is_contiguous() and out.is_contiguous() and out.dtype == torch.float32
        log2_group = stored.group.bit_length() - 1
        unpack_rows(packed.data_ptr(), rows, columns, log2_group, out.data_ptr(), packed.shape[1], threads)

    return Quantizer(_compiled_pack("pack", stored, cache, threads), unpack)


def compiled_weight_packer(stored: Grouped, cache: Path, threads: int) -> Pack:
    """least_squares.pack in C++ on `threads` threads, whose number has no effect on the bytes. Raises NoCompilerError
    where it cannot be built."""
    return _compiled_pack("pack_weights", stored, cache, threads)


def numba_weight_packer(stored: Grouped, threads: int) -> Pack:
    """least_squares.pack with its codes by numba. Raises ImportError where numba is not installed."""
    from engines.offload.kernels import numba_quantizer as compiled  # numba is optional

    return lambda x: compiled.pack_with(x, *least_squares.scales_and_minima(x, stored), stored, threads)


def _compiled_pack(verb: str, stored: Grouped, cache: Path, threads: int) -> Pack:
    pack_rows = _function(verb, stored, cache)

    def pack(x: torch.Tensor) -> torch.Tensor:
        rows = x.float().contiguous()
        columns, width, log2_group = x.shape[-1], stored.row_bytes(x.shape[-1]), stored.group.bit_length() - 1
        packed = torch.empty(*x.shape[:-1], width, dtype=torch.uint8)
        pack_rows(rows.data_ptr(), rows.numel() // columns, columns, log2_group, packed.data_ptr(), width, threads)
        return packed

    return pack


def _function(verb: str, stored: Grouped, cache: Path) -> Any:
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    arguments = [pointer, number, number, small, pointer, number, small]
    return function(CSRC / "quantizer.cpp", f"{verb}_{stored.name}", arguments, cache)
