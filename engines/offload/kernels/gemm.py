"""GEMM with weights as they are stored: by torch, for weights that it can multiply, and by the compiled kernel."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from engines.offload.kernels.build import CSRC, function
from engines.offload.memory.storage import Plain, Storage

#: (x [rows, k], weight, start, out [rows, n]) -> None: out = start + x W^T. `start` is one row [n] added to all rows (a
#: bias), `out` itself (accumulate), or None for zeros. W [n, k] comes as it is stored: plain, or packed rows in uint8.
Gemm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]


def torch_gemm(x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor | None, out: torch.Tensor) -> None:
    """By torch's BLAS, all operands in one dtype: the reference."""
    if start is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(start, x, weight.t(), out=out)


def compiled_gemm(stored: Storage, cache: Path, threads: int) -> Gemm:
    """The C++ kernel on `threads` threads: x, start and out in float32, the contiguous weight as `stored`.

    Rows of out may be any stride apart. Raises NoCompilerError where it cannot be built.
    """
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    arguments = [pointer, number, pointer, pointer, number, pointer, number, number, number, number, small]
    name = f"gemm_{stored.name}"
    if not isinstance(stored, Plain):
        name += f"_axis{stored.group_axis}"
        arguments += [number, small]
    kernel = function(CSRC / "gemm.cpp", name, arguments, cache)

    def gemm(x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor | None, out: torch.Tensor) -> None:
        x = x if x.stride(1) == 1 else x.contiguous()
        (rows, k), n = x.shape, out.shape[1]
        assert x.dtype == out.dtype == torch.float32
        assert weight.is_contiguous() and out.stride(1) == 1
        assert start is None or start is out or (start.dtype == torch.float32 and start.is_contiguous())
        if isinstance(stored, Plain):
            layout: tuple[int, ...] = ()
            assert weight.shape == (n, k)
        else:
            layout = (weight.shape[1], stored.group.bit_length() - 1)
            assert weight.shape == ((n, stored.row_bytes(k)) if stored.group_axis else (k, stored.row_bytes(n)))
        kernel(
            x.data_ptr(), x.stride(0), weight.data_ptr(), None if start is None else start.data_ptr(),
            out.stride(0) if start is out else 0, out.data_ptr(), out.stride(0), rows, n, k, threads, *layout,
        )  # fmt: skip

    return gemm
