"""Products with weights as they are stored: the compiled kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from engines.offload.kernels.build import function
from engines.offload.memory.storage import Plain, Storage

#: (x [rows, k], weight, start, out [rows, n]): out = start + x W^T, where `start` is one row [n] for all, such as a
#: bias, or `out` itself, or nothing. The weight W [n, k] is given as it is stored: in its dtype, or as uint8 rows.
Gemm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]


def compiled_gemm(stored: Storage, cache: Path, threads: int) -> Gemm:
    """The C++ kernel on `threads` threads, for x, start and out in float32 and the weight as `stored`.

    The rows of out may be any distance apart; the weight is contiguous. Raises NoCompilerError where it cannot be
    built.
    """
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    arguments = [pointer, number, pointer, pointer, number, pointer, number, number, number, number, small]
    name = f"product_{stored.name}"
    if not isinstance(stored, Plain):
        name += "_Across" if stored.across else "_Along"
        arguments += [number, small]
    kernel = function(Path(__file__).with_name("csrc") / "product.cpp", name, arguments, cache)

    def product(x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor | None, out: torch.Tensor) -> None:
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
            assert weight.shape == ((k, stored.row_bytes(n)) if stored.across else (n, stored.row_bytes(k)))
        kernel(
            x.data_ptr(), x.stride(0), weight.data_ptr(), None if start is None else start.data_ptr(),
            out.stride(0) if start is out else 0, out.data_ptr(), out.stride(0), rows, n, k, threads, *layout,
        )  # fmt: skip

    return product
