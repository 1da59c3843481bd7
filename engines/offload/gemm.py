"""Products with freshly loaded weight blocks, in whichever way and dtype is fastest on this CPU.

Which is fastest depends on the CPU and its maker: bfloat16 where the CPU has instructions for it, else float32; by
torch's library after a cast, or by our kernel (kernels/product.cpp), which needs none. So it is measured, at load.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engines.offload.kernels import NoCompilerError, Product, compiled_product
from engines.offload.layout import BLOCK_BYTES
from harness.api import DTYPE_BYTES, Dtype, LocalModel, OffloadPolicy

#: Rows at which the choice is made: a pass of some prompts and many decoding sequences.
_ROWS = 256
_ROUNDS = 12
#: Values between the rows of a product. Rows a power of two apart, as most models' are, fall into few sets of the
#: CPU's caches: MKL multiplied 300 rows 15 % slower into such a matrix.
_ROW_PAD = 16


@dataclass(frozen=True)
class Arithmetic:
    """How this engine multiplies. `dtype`: of activations; `weights`: of the weights that `product` takes.

    `flops`: FLOP/s measured, with the cast of a block from its stored dtype where there is one.
    """

    name: str
    dtype: Dtype
    weights: Dtype
    product: Product
    flops: float = 0.0


def choose(model: LocalModel, policy: OffloadPolicy, cache: Path) -> Arithmetic:
    """The fastest way in the dtype asked for or, if none is, in the stored dtype and float32."""
    asked = policy.compute_dtype
    dtypes: list[Dtype] = [asked] if asked != "auto" else sorted({model.dtype, "float32"})
    ways = [Arithmetic("torch", dtype, dtype, by_torch) for dtype in dtypes]
    if "float32" in dtypes:
        with suppress(NoCompilerError):  # the engine says so, where it chooses its attention
            ways.append(Arithmetic("kernel", "float32", model.dtype, compiled_product(cache, torch.get_num_threads())))
    width = min(model.shape.hidden, 2048)
    return max((_measured(way, model.dtype, width) for way in ways), key=lambda way: way.flops)


def new_product(rows: int, outputs: int, like: torch.Tensor) -> torch.Tensor:
    """Room for a product [rows, outputs], its rows a little apart, of the same dtype as `like`."""
    return like.new_empty(rows, outputs + _ROW_PAD)[:, :outputs]


def by_torch(x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor | None, out: torch.Tensor) -> None:
    """With the library that torch carries."""
    if start is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(start, x, weight.t(), out=out)


@torch.inference_mode()
def _measured(way: Arithmetic, stored: Dtype, width: int) -> Arithmetic:
    """FLOP/s over blocks that are multiplied in turn, with other work between them; the best of some rounds."""
    height = BLOCK_BYTES // DTYPE_BYTES[stored] // width
    blocks = torch.full((4, height, width), 0.01, dtype=getattr(torch, stored))
    cast = torch.empty(height, width, dtype=getattr(torch, way.weights))
    x = torch.full((_ROWS, width), 0.01, dtype=getattr(torch, way.dtype))
    out = torch.empty(_ROWS, height, dtype=x.dtype)
    best = float("inf")
    for i in range(_ROUNDS):
        began = time.perf_counter()
        weight = blocks[i % 4]
        way.product(x, weight if way.weights == stored else cast.copy_(weight), None, out)
        out += 1  # with torch's threads, which must not be in the way
        best = min(best, time.perf_counter() - began)
    return replace(way, flops=2 * _ROWS * width * height / best)
