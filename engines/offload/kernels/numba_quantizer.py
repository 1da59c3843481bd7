"""Quantizing and its undoing compiled by numba, for hosts without a C++ compiler. Imports numba, which is optional."""

from __future__ import annotations

import threading

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba import njit, prange

from engines.offload.kernels import quantize
from engines.offload.memory.storage import EIGHT, Grouped

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
#: Some of numba's threading layers end the process when two threads enter.
_one_at_a_time = threading.Lock()


def pack(x: torch.Tensor, how: Grouped, threads: int) -> torch.Tensor:
    """As quantize.pack."""
    step, low = quantize.pairs(x, how)
    columns = x.shape[-1]
    codes = torch.empty(*x.shape[:-1], how.code_bytes(columns), dtype=torch.uint8)
    flat, steps, lows = (part.float().reshape(-1, part.shape[-1]).numpy() for part in (x, step, low))
    with _one_at_a_time:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        _pack(flat, steps, lows, how.bits, how.group, codes.view(-1, codes.shape[-1]).numpy())
    return torch.cat([codes, quantize.raw(step), quantize.raw(low)], -1)


def unpack(packed: torch.Tensor, out: torch.Tensor, how: Grouped, threads: int) -> None:
    """As quantize.unpack, of rows [rows, row_bytes] into float32 [rows, columns]."""
    pairs = 2 * how.groups(out.shape[1])
    codes, step, low = torch.split(packed, [how.code_bytes(out.shape[1]), pairs, pairs], -1)
    steps, lows = (quantize.halves(part).float().numpy() for part in (step, low))
    with _one_at_a_time:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        _unpack(codes.numpy(), steps, lows, how.bits, how.group, out.numpy())


@njit(parallel=True)
def _pack(x: _Floats, steps: _Floats, lows: _Floats, bits: int, group: int, out: _Bytes) -> None:
    most = (1 << bits) - 1
    for row in prange(x.shape[0]):
        for first in range(0, x.shape[1], EIGHT):
            step, low = np.float64(steps[row, first // group]), np.float64(lows[row, first // group])
            word = np.uint64(0)
            if step > 0:
                for i in range(min(EIGHT, x.shape[1] - first)):
                    code = np.rint((np.float64(x[row, first + i]) - low) / step)
                    word |= np.uint64(min(max(code, 0), most)) << np.uint64(i * bits)
            for i in range(bits):
                out[row, first // EIGHT * bits + i] = np.uint8((word >> np.uint64(8 * i)) & np.uint64(255))


@njit(parallel=True)
def _unpack(codes: _Bytes, steps: _Floats, lows: _Floats, bits: int, group: int, out: _Floats) -> None:
    mask = np.uint64((1 << bits) - 1)
    for row in prange(out.shape[0]):
        for first in range(0, out.shape[1], EIGHT):
            step, low = steps[row, first // group], lows[row, first // group]
            word = np.uint64(0)
            for i in range(bits):
                word |= np.uint64(codes[row, first // EIGHT * bits + i]) << np.uint64(8 * i)
            for i in range(min(EIGHT, out.shape[1] - first)):
                out[row, first + i] = low + np.float32((word >> np.uint64(i * bits)) & mask) * step
