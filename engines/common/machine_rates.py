"""Measures how fast this machine multiplies matrices, for the bound that a run is compared with."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

_Product = Callable[[torch.Tensor, torch.Tensor], object]

_REPETITIONS = 5
_POINT_S = 0.3
#: An engine finds no weight in the CPU's cache, having read all the others since: more than any cache holds.
_ROTATED_BYTES = 256 << 20


def gemm_rates(
    dtypes: Sequence[str],
    rows: Sequence[int],
    k: int,
    n: int,
    threads: int | None = None,
    seconds: float = 30.0,
) -> dict[str, dict[str, list[float]]]:
    """FLOP/s of x[rows, k] times the transpose of a weight [n, k]: `rates[dtype][str(rows)]`.

    By torch and, in float32, by numpy as well, which carries another BLAS: either may be what the machine can do.
    Each has one warm-up and at most five repetitions or 0.3 s a point, every sample kept; the reader takes the
    best. Points left when `seconds` are over are left out. Multiplications take turns over copies of the weight
    of 256 MiB together, as none comes from the cache when a model runs. A multiply-add counts as two operations.
    """
    began = time.perf_counter()
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        rates: dict[str, dict[str, list[float]]] = {}
        for dtype in dtypes:
            copies = max(1, _ROTATED_BYTES // (n * k * getattr(torch, dtype).itemsize))
            weights = torch.full((copies, n, k), 0.01, dtype=getattr(torch, dtype))
            rates[dtype] = {
                str(count): [s for product in _products(dtype) for s in _samples(product, weights, count)]
                for count in rows
                if time.perf_counter() - began < seconds
            }
            del weights  # before those of the next dtype are made
        return rates
    finally:
        torch.set_num_threads(before)


def device_rates(
    dtypes: Sequence[str], rows: Sequence[int], k: int, n: int
) -> tuple[dict[str, dict[str, list[float]]], list[float]]:
    """As `gemm_rates`, of the CUDA device, and bytes/s of copies of pinned memory to it; nothing where there is none.

    As much is multiplied, and copied, between two readings of the clock as tens of milliseconds take.
    """
    if not torch.cuda.is_available():
        return {}, []
    rates: dict[str, dict[str, list[float]]] = {}
    for dtype in dtypes:
        copies = max(1, _ROTATED_BYTES // (n * k * getattr(torch, dtype).itemsize))
        weights = torch.full((copies, n, k), 0.01, dtype=getattr(torch, dtype), device="cuda")
        rates[dtype] = {str(count): _device_samples(weights, count) for count in rows}
        del weights
    below = torch.empty(_ROTATED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(below, device="cuda")
    seconds = _device_seconds(lambda: there.copy_(below, non_blocking=True))
    return rates, [_ROTATED_BYTES / s for s in seconds]


@torch.inference_mode()
def _device_samples(weights: torch.Tensor, rows: int) -> list[float]:
    """FLOP/s of each repetition over all copies [copies, n, k] of a weight."""
    copies, n, k = weights.shape
    x = torch.full((rows, k), 0.01, dtype=weights.dtype, device=weights.device)

    def multiply() -> None:
        for weight in weights:
            torch.nn.functional.linear(x, weight)

    return [2 * rows * k * n * copies / s for s in _device_seconds(multiply)]


def _device_seconds(work: Callable[[], object]) -> list[float]:
    """Seconds of each repetition on the device, by its own events; the first is not counted."""
    found = []
    for i in range(_REPETITIONS + 1):
        began, ended = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        if i:
            found.append(began.elapsed_time(ended) / 1e3)
    return found


def _products(dtype: str) -> list[_Product]:
    return [torch.nn.functional.linear, _by_numpy] if dtype == "float32" else [torch.nn.functional.linear]


def _by_numpy(x: torch.Tensor, weight: torch.Tensor) -> object:
    return np.matmul(x.numpy(), weight.numpy().T)


@torch.inference_mode()
def _samples(product: _Product, weights: torch.Tensor, rows: int) -> list[float]:
    """FLOP/s of each repetition after a warm-up, at least one; weights[copies, n, k] take turns."""
    _, n, k = weights.shape
    x = torch.full((rows, k), 0.01, dtype=weights.dtype)
    turns = itertools.cycle(weights)
    product(x, next(turns))
    samples: list[float] = []
    began = time.perf_counter()
    while not samples or (len(samples) < _REPETITIONS and time.perf_counter() - began < _POINT_S):
        weight = next(turns)
        start = time.perf_counter()
        product(x, weight)
        samples.append(2 * rows * k * n / (time.perf_counter() - start))
    return samples
