"""Rotates keys and values by a Hadamard matrix before they are quantized, so that outlier columns spread over all.

Keys have a few columns many times as large as the rest, and these would set the scale of their groups. After an
orthogonal rotation all columns are about equally large. It changes nothing else: the dot product of two rotated vectors
is that of the originals, and a weighted sum of rotated values is rotated back once. What a cache of few bits then costs
a real model, tests/integration/test_smollm2.py holds. Source: QuaRot (Ashkboos et al. 2024), section 4, done
at run time, without changing weights.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from engines.offload.kernels.build import CSRC, function

#: x [..., columns] -> the rotated rows, same shape, float32.
Hadamard = Callable[[torch.Tensor], torch.Tensor]


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [..., columns] times a normalized Walsh-Hadamard matrix, in float32; applied twice it is the identity.

    If `columns` is no power of two, the matrix is block-diagonal with blocks of the largest power of two that divides
    it. It takes sums of pairs only, so a row's result does not depend, bit for bit, on the other rows.
    """
    columns = x.shape[-1]
    size = _block_size(columns)
    rotated = x.float().reshape(-1, columns // size, size)
    half = 1
    while half < size:
        a, b = rotated.view(-1, size // (2 * half), 2, half).unbind(2)
        rotated = torch.stack([a + b, a - b], 2)
        half *= 2
    return rotated.mul(_scale(size)).view(x.shape)


def device_hadamard() -> Hadamard:
    """`hadamard` as one product with the matrix: on a device launches cost more than arithmetic."""

    @cache
    def matrix(columns: int, device: torch.device) -> torch.Tensor:
        return hadamard(torch.zeros(columns, columns, device=device).fill_diagonal_(1.0))

    return lambda x: x.float() @ matrix(x.shape[-1], x.device)


def compiled_hadamard(folder: Path, threads: int) -> Hadamard:
    """`hadamard` by the C++ kernel, to the same bits. Raises NoCompilerError where it cannot be built."""
    arguments = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_float, ctypes.c_int]
    kernel = function(CSRC / "hadamard.cpp", "hadamard", arguments, folder)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=torch.float32).copy_(x)
        size = _block_size(x.shape[-1])
        kernel(out.data_ptr(), out.numel() // size, size, _scale(size), threads)
        return out

    return rotate


def _block_size(columns: int) -> int:
    """The largest power of two that divides `columns`."""
    return columns & -columns


def _scale(size: int) -> float:
    return float(size**-0.5)
