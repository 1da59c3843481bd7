"""Quantizers: values to what is stored and back, in C++, numba or torch, all to the same bits."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engines.offload.kernels import quantize
from engines.offload.kernels.build import CSRC, function
from engines.offload.memory.storage import Grouped, Plain, Storage


@dataclass(frozen=True)
class Quantizer:
    """Converts values to one storage and back.

    `pack`: float rows [..., columns] to [..., columns] in the stored dtype, or to packed rows uint8 [..., row_bytes].
    `unpack`: stored rows [rows, ...] into a contiguous [rows, columns]; packed rows into float32.
    """

    pack: Callable[[torch.Tensor], torch.Tensor]
    unpack: Callable[[torch.Tensor, torch.Tensor], None]


def stored_view(raw: torch.Tensor, stored: Storage, rows: int, columns: int) -> torch.Tensor:
    """The stored bytes uint8 [...] of a weight W[rows, columns], viewed as kernels and quantizers take it."""
    if isinstance(stored, Plain):
        return raw.view(getattr(torch, stored.dtype)).view(rows, columns)
    return raw.view(-1, stored.row_bytes(columns if stored.group_axis else rows))


def plain_quantizer(stored: Plain) -> Quantizer:
    """Casts to the stored dtype, and copies back."""
    dtype = getattr(torch, stored.dtype)

    def unpack(values: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(values)

    return Quantizer(lambda x: x.to(dtype), unpack)


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
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    arguments = [pointer, number, number, small, pointer, number, small]
    pack_rows, unpack_rows = (
        function(CSRC / "quantizer.cpp", f"{verb}_{stored.name}", arguments, cache) for verb in ("pack", "unpack")
    )
    log2_group = stored.group.bit_length() - 1

    def pack(x: torch.Tensor) -> torch.Tensor:
        rows = x.float().contiguous()
        columns, width = x.shape[-1], stored.row_bytes(x.shape[-1])
        packed = torch.empty(*x.shape[:-1], width, dtype=torch.uint8)
        pack_rows(rows.data_ptr(), rows.numel() // columns, columns, log2_group, packed.data_ptr(), width, threads)
        return packed

    def unpack(packed: torch.Tensor, out: torch.Tensor) -> None:
        rows, columns = out.shape
        assert packed.shape == (rows, stored.row_bytes(columns))
        assert packed.is_contiguous() and out.is_contiguous() and out.dtype == torch.float32
        unpack_rows(packed.data_ptr(), rows, columns, log2_group, out.data_ptr(), packed.shape[1], threads)

    return Quantizer(pack, unpack)
