"""Products with freshly loaded weight blocks, by whichever library and dtype is fastest on this CPU.

torch and numpy carry different BLAS libraries, and which is faster depends on the maker of the CPU and on the
number of rows: on AMD, OpenBLAS multiplied 350 rows 10 to 20 % faster than MKL. So it is measured, at load.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engines.offload.layout import BLOCK_BYTES
from harness.api import DTYPE_BYTES, Dtype, LocalModel, OffloadPolicy

#: (x [rows, k], weight [n, k], out [rows, n], accumulate): out = x W^T, or += where `accumulate`.
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], None]

#: Rows at which the choice is made: a pass of some prompts and many decoding sequences.
_ROWS = 256
_ROUNDS = 12


@dataclass(frozen=True)
class Arithmetic:
    """How this engine multiplies: compute dtype, library, and the FLOP/s measured with the cast included."""

    dtype: Dtype
    library: str
    product: Product
    flops: float


def choose(model: LocalModel, policy: OffloadPolicy) -> Arithmetic:
    """The fastest way among the dtype asked for or, if none is, the stored dtype and float32."""
    asked = policy.compute_dtype
    dtypes: list[Dtype] = [asked] if asked != "auto" else sorted({model.dtype, "float32"})
    ways: list[tuple[Dtype, str, Product]] = []
    for dtype in dtypes:
        ways.append((dtype, "torch", by_torch))
        if dtype == "float32":
            ways.append((dtype, "numpy", ByNumpy()))
    width = min(model.shape.hidden, 2048)
    found = [Arithmetic(d, name, p, _measure(p, model.dtype, d, width)) for d, name, p in ways]
    return max(found, key=lambda a: a.flops)


def by_torch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    """With the BLAS that torch carries."""
    if accumulate:
        out.addmm_(x, weight.t())
    else:
        torch.mm(x, weight.t(), out=out)


class ByNumpy:
    """With the BLAS that numpy carries; float32 only. numpy cannot accumulate: a scratch is kept for that."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
        if not accumulate:
            np.matmul(x.numpy(), weight.numpy().T, out=out.numpy())
            return
        if self._scratch.numel() < out.numel():
            self._scratch = torch.empty(out.numel())
        part = self._scratch[: out.numel()].view(out.shape)
        np.matmul(x.numpy(), weight.numpy().T, out=part.numpy())
        out += part


@torch.inference_mode()
def _measure(product: Product, stored: Dtype, dtype: Dtype, width: int) -> float:
    """FLOP/s over blocks that are cast and multiplied in turn, as in a pass; the best of some rounds."""
    height = BLOCK_BYTES // DTYPE_BYTES[stored] // width
    blocks = torch.full((4, height, width), 0.01, dtype=getattr(torch, stored))
    cast = torch.empty(height, width, dtype=getattr(torch, dtype))
    x = torch.full((_ROWS, width), 0.01, dtype=cast.dtype)
    out = torch.empty(_ROWS, height, dtype=cast.dtype)
    best = float("inf")
    for i in range(_ROUNDS):
        began = time.perf_counter()
        product(x, cast.copy_(blocks[i % 4]), out, False)
        best = min(best, time.perf_counter() - began)
    return 2 * _ROWS * width * height / best
