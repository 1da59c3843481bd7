"""Root-mean-square norms in one call, where torch needs eight."""

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from engines.offload.kernels.build import CSRC, function
from engines.offload.kernels.launch import launch

#: x [..., columns], weight [columns] in the same dtype and epsilon -> the normed rows, as `rms_norm` defines them.
RMSNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
#: Dtypes that the compiled kernel takes.
DTYPES = (torch.float32, torch.bfloat16)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon), rounded to the dtype of x before the weight is multiplied and after.

    Source: RMSNorm (Zhang and Sennrich 2019), equation 4; rounded as in transformers' LlamaRMSNorm.
    """
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def compiled_rms_norm(cache: Path) -> RMSNorm:
    """`rms_norm` by the C++ kernel, in another order of sums: a row's result depends on that row alone. It runs on as
    many threads as torch. Raises NoCompilerError where it cannot be built."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    arguments = [pointer, number, pointer, ctypes.c_float, pointer, number, number, ctypes.c_int]
    source = CSRC / "rms_norm.cpp"
    kernels = {
        dtype: function(source, f"rms_norm_{str(dtype).removeprefix('torch.')}", arguments, cache) for dtype in DTYPES
    }

    def bind(epsilon: float, rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        return partial(
            kernels[rows.dtype], rows.data_ptr(), rows.stride(0), weight.data_ptr(), epsilon, out.data_ptr(),
            *rows.shape, torch.get_num_threads(),
        )  # fmt: skip

    def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        columns = x.shape[-1]
        rows = x.reshape(-1, columns)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        assert weight.dtype == x.dtype and weight.shape == (columns,) and weight.is_contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        launch(partial(bind, epsilon), rows, weight, out)
        return out

    return norm
