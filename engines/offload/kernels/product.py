"""Products with weights as they are stored: the compiled kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from engines.offload.kernels.build import by_dtype

#: (x [rows, k], weight [n, k], start, out [rows, n]): out = start + x W^T, where `start` is one row [n] for all, such
#: as a bias, or `out` itself, or nothing.
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]


def compiled_product(cache: Path, threads: int) -> Product:
    """The C++ kernel on `threads` threads: x, start and out float32, the weight float32, bfloat16 or float16.

    The rows of out may be any distance apart; the weight is contiguous. Raises NoCompilerError where it cannot be
    built.
    """
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    arguments = [pointer, number, pointer, pointer, number, pointer, number, number, number, number, ctypes.c_int]
    functions = by_dtype(Path(__file__).with_name("product.cpp"), "product", arguments, cache)

    def product(x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor | None, out: torch.Tensor) -> None:
        x = x if x.stride(1) == 1 else x.contiguous()
        assert x.dtype == out.dtype == torch.float32
        assert weight.is_contiguous() and out.stride(1) == 1
        assert start is None or start is out or (start.dtype == torch.float32 and start.is_contiguous())
        functions[weight.dtype](
            x.data_ptr(), x.stride(0), weight.data_ptr(), None if start is None else start.data_ptr(),
            out.stride(0) if start is out else 0, out.data_ptr(), out.stride(0), len(x), *weight.shape, threads,
        )  # fmt: skip

    return product
