"""The quantizer compiled by numba, for hosts without a C++ compiler. Imports numba, which is optional."""

import threading

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba import njit, prange

from engines.offload.kernels import quantize
from engines.offload.memory.storage import CODES_PER_WORD, Grouped

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
#: Some of numba's threading layers abort the process when two threads enter them.
_one_at_a_time = threading.Lock()


def pack(x: torch.Tensor, stored: Grouped, threads: int) -> torch.Tensor:
    """As quantize.pack."""
    return pack_with(x, *quantize.scales_and_minima(x, stored), stored, threads)


def pack_with(
    x: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, stored: Grouped, threads: int
) -> torch.Tensor:
    """As quantize.pack_with."""
    columns = x.shape[-1]
    codes = torch.empty(*x.shape[:-1], stored.code_bytes(columns), dtype=torch.uint8)
    flat, scales, minima = (part.float().reshape(-1, part.shape[-1]).numpy() for part in (x, scale, minimum))
    with _one_at_a_time:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        _pack(flat, scales, minima, stored.bits, stored.group, codes.view(-1, codes.shape[-1]).numpy())
    return torch.cat([codes, quantize.raw(scale), quantize.raw(minimum)], -1)


def unpack(packed: torch.Tensor, out: torch.Tensor, stored: Grouped, threads: int) -> None:
    """As quantize.unpack, from packed rows [rows, row_bytes] into float32 [rows, columns]."""
    codes, scales, minima = (part.numpy() for part in quantize.split(packed, out.shape[1], stored))
    with _one_at_a_time:
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        _unpack(codes, scales, minima, stored.bits, stored.group, out.numpy())


@njit(parallel=True)
def _pack(x: _Floats, scales: _Floats, minima: _Floats, bits: int, group: int, out: _Bytes) -> None:
    most = (1 << bits) - 1
    for row in prange(x.shape[0]):
        for first in range(0, x.shape[1], CODES_PER_WORD):
            scale, minimum = np.float64(scales[row, first // group]), np.float64(minima[row, first // group])
            word = np.uint64(0)
            if scale > 0:
                for i in range(min(CODES_PER_WORD, x.shape[1] - first)):
                    code = np.rint((np.float64(x[row, first + i]) - minimum) / scale)
                    word |= np.uint64(min(max(code, 0), most)) << np.uint64(i * bits)
            for i in range(bits):
                out[row, first // CODES_PER_WORD * bits + i] = np.uint8((word >> np.uint64(8 * i)) & np.uint64(255))


@njit(parallel=True)
def _unpack(codes: _Bytes, scales: _Floats, minima: _Floats, bits: int, group: int, out: _Floats) -> None:
    mask = np.uint64((1 << bits) - 1)
    for row in prange(out.shape[0]):
        for first in range(0, out.shape[1], CODES_PER_WORD):
            scale, minimum = scales[row, first // group], minima[row, first // group]
            word = np.uint64(0)
            for i in range(bits):
                word |= np.uint64(codes[row, first // CODES_PER_WORD * bits + i]) << np.uint64(8 * i)
            for i in range(min(CODES_PER_WORD, out.shape[1] - first)):
                out[row, first + i] = minimum + np.float32((word >> np.uint64(i * bits)) & mask) * scale
