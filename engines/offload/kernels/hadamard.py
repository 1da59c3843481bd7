"""Spreads what is large in a few columns over all of them, before keys and values are quantized.

Keys have columns that are many times as large as the others, and so would decide the steps of their groups. Turned by
an orthogonal matrix all columns are about as large, and nothing else changes: a product of two turned vectors is that
of the vectors, and a sum of turned values is turned back. What a cache of few bits then costs a real model is held by
tests/integration/test_smollm2_quantized.py. Source: QuaRot (Ashkboos et al. 2024), section 4, at run time and without a
change of weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from engines.offload.kernels.build import function

#: x [..., columns] -> as many values in float32, turned.
Hadamard = Callable[[torch.Tensor], torch.Tensor]


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [..., columns] times a Walsh-Hadamard matrix, in float32; the same again turns back.

    Of columns that are no power of two, parts as large as the largest power that divides them are turned. Sums of
    pairs are all it takes, so a row's result does not depend, in bits, on what is turned with it.
    """
    columns = x.shape[-1]
    size = _power(columns)
    turned = x.float().reshape(-1, columns // size, size)
    half = 1
    while half < size:
        a, b = turned.view(-1, size // (2 * half), 2, half).unbind(2)
        turned = torch.stack([a + b, a - b], 2)
        half *= 2
    return turned.mul(_scale(size)).view(x.shape)


def compiled_hadamard(cache: Path, threads: int) -> Hadamard:
    """The same, to the bit, by the C++ kernel. Raises NoCompilerError where it cannot be built."""
    arguments = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_float, ctypes.c_int]
    kernel = function(Path(__file__).with_name("csrc") / "rotation.cpp", "turn", arguments, cache)

    def turned(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=torch.float32).copy_(x)
        size = _power(x.shape[-1])
        kernel(out.data_ptr(), out.numel() // size, size, _scale(size), threads)
        return out

    return turned


def _power(columns: int) -> int:
    """The largest power of two that divides a number."""
    return columns & -columns


def _scale(size: int) -> float:
    return float(size**-0.5)
