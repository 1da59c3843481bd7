"""Values to what is stored and back, by the fastest way there is: C++, else numba, else torch; all to the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engines.offload.kernels import quantize
from engines.offload.kernels.build import function
from engines.offload.memory.storage import Grouped, Plain, Storage


@dataclass(frozen=True)
class Quantizer:
    """Of one kind of storage. `pack`: float rows [..., columns] to what is stored, [..., columns] in the stored dtype
    or uint8 [..., row_bytes]. `unpack`: stored rows [rows, ...] into [rows, columns], contiguous, float32 where they
    are packed.
    """

    pack: Callable[[torch.Tensor], torch.Tensor]
    unpack: Callable[[torch.Tensor, torch.Tensor], None]


def stored_view(raw: torch.Tensor, stored: Storage, rows: int, columns: int) -> torch.Tensor:
    """The stored bytes uint8 [...] of a weight W[rows, columns] as what kernels and quantizers take."""
    if isinstance(stored, Plain):
        return raw.view(getattr(torch, stored.dtype)).view(rows, columns)
    return raw.view(-1, stored.row_bytes(rows if stored.across else columns))


def _copy(stored: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(stored)


def plain_quantizer(stored: Plain) -> Quantizer:
    """Of values that are stored one by one."""
    dtype = getattr(torch, stored.dtype)
    return Quantizer(lambda x: x.to(dtype), _copy)


def reference_quantizer(how: Grouped) -> Quantizer:
    """quantize.py's."""

    def unpack(packed: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(quantize.unpack(packed, out.shape[1], how))

    return Quantizer(lambda x: quantize.pack(x, how), unpack)


def numba_quantizer(how: Grouped, threads: int) -> Quantizer:
    """numba's, on `threads` threads. Raises ImportError where that is not installed."""
    from engines.offload.kernels import numba_quantizer as compiled  # it is optional

    return Quantizer(
        lambda x: compiled.pack(x, how, threads), lambda packed, out: compiled.unpack(packed, out, how, threads)
    )


def compiled_quantizer(how: Grouped, cache: Path, threads: int) -> Quantizer:
    """The C++ kernels on `threads` threads. Raises NoCompilerError where they cannot be built."""
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    arguments = [pointer, number, number, small, pointer, number, small]
    source = Path(__file__).with_name("csrc") / "pack.cpp"
    packing, unpacking = (function(source, f"{verb}_{how.name}", arguments, cache) for verb in ("pack", "unpack"))
    shift = how.group.bit_length() - 1

    def pack(x: torch.Tensor) -> torch.Tensor:
        rows = x.float().contiguous()
        columns, width = x.shape[-1], how.row_bytes(x.shape[-1])
        packed = torch.empty(*x.shape[:-1], width, dtype=torch.uint8)
        packing(rows.data_ptr(), rows.numel() // columns, columns, shift, packed.data_ptr(), width, threads)
        return packed

    def unpack(packed: torch.Tensor, out: torch.Tensor) -> None:
        rows, columns = out.shape
        assert packed.shape == (rows, how.row_bytes(columns))
        assert packed.is_contiguous() and out.is_contiguous() and out.dtype == torch.float32
        unpacking(packed.data_ptr(), rows, columns, shift, out.data_ptr(), packed.shape[1], threads)

    return Quantizer(pack, unpack)
