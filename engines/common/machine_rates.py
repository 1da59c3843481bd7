"""Measures this machine's matrix multiplication and copy rates, for the roofline that a run is compared with."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_REPETITIONS = 5
_POINT_S = 0.3
#: Weights multiplied in rotation, so that none is in the CPU cache when it is used again, as in a model's pass.
_ROTATED_BYTES = 256 << 20


def gemm_rates(
    dtypes: Sequence[str],
    rows: Sequence[int],
    k: int,
    n: int,
    threads: int | None = None,
    seconds: float = 30.0,
) -> dict[str, dict[str, list[float]]]:
    """FLOP/s of x[rows, k] times the transpose of a weight [n, k]: `rates[dtype][str(rows)]`, one entry a sample.

    Multiplies with torch, by weights as they are and in the layout that oneDNN prefers; in int8 in that layout, or in
    FBGEMM's on a CPU without VNNI; in float32 with numpy too, which brings another BLAS that may be faster. Each point
    has one warm-up and at most five repetitions or 0.3 s; every sample is kept, and the reader takes the best. After
    `seconds` the remaining points are skipped. The multiplications rotate over up to 256 MiB of copies of the weight,
    so that none is in the CPU cache, as in a model's pass. A multiply-add counts as two operations.
    """
    began = time.perf_counter()
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        rates: dict[str, dict[str, list[float]]] = {}
        for dtype in dtypes:
            copies = max(1, _ROTATED_BYTES // (n * k * getattr(torch, dtype).itemsize))
            weights = _filled((copies, n, k), getattr(torch, dtype))
            rates[dtype] = {
                str(count): [s for way in _ways(dtype) for s in _samples(way, weights, count)]
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
    """FLOP/s of the CUDA device as in `gemm_rates`, and bytes/s of copies to it from pinned memory.

    Both are empty without a device. One sample covers tens of milliseconds of work between two CUDA events.
    """
    if not torch.cuda.is_available():
        return {}, []
    rates: dict[str, dict[str, list[float]]] = {}
    for dtype in dtypes:
        copies = max(1, _ROTATED_BYTES // (n * k * getattr(torch, dtype).itemsize))
        weights = torch.full((copies, n, k), 0.01, dtype=getattr(torch, dtype), device="cuda")
        rates[dtype] = {str(count): _device_samples(weights, count) for count in rows}
        del weights
    host = torch.empty(_ROTATED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    seconds = _device_seconds(lambda: device.copy_(host, non_blocking=True))
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
    """Seconds of each repetition by CUDA events, without the first one (the warm-up)."""
    seconds = []
    for i in range(_REPETITIONS + 1):
        began, ended = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        if i:
            seconds.append(began.elapsed_time(ended) / 1e3)
    return seconds


@dataclass(frozen=True)
class _Way:
    """A way to multiply on the CPU: with a weight [n, k], once it is prepared for so many rows."""

    multiply: Callable[[torch.Tensor, torch.Tensor], object]
    prepare: Callable[[torch.Tensor, int], torch.Tensor] = lambda weight, rows: weight


def _ways(dtype: str) -> list[_Way]:
    if dtype == "int8":
        # without VNNI oneDNN's is a reference that takes minutes
        by_onednn = _Way(_by_quantized_onednn, lambda weight, rows: torch.ops.onednn.qlinear_prepack(weight, None))
        other = "fbgemm" in torch.backends.quantized.supported_engines and not torch.cpu._is_vnni_supported()
        return [_Way(_by_fbgemm, _packed_by_fbgemm) if other else by_onednn]
    ways = [_Way(torch.nn.functional.linear)]
    if torch._C._has_mkldnn and _packs(dtype):
        ways.append(_Way(_by_onednn, torch.ops.mkldnn._reorder_linear_weight))
    return [*ways, _Way(_by_numpy)] if dtype == "float32" else ways


def _packs(dtype: str) -> bool:
    """Whether oneDNN packs weights of `dtype` on this CPU: of 16 bits only where it has instructions for them."""
    mkldnn = torch.ops.mkldnn
    supported = {"bfloat16": mkldnn._is_mkldnn_bf16_supported, "float16": mkldnn._is_mkldnn_fp16_supported}
    return dtype not in supported or bool(supported[dtype]())


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small values, of which products do not overflow."""
    return torch.full(shape, 0.01 if dtype.is_floating_point else 1, dtype=dtype)


def _by_onednn(x: torch.Tensor, packed: torch.Tensor) -> object:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _by_quantized_onednn(x: torch.Tensor, packed: torch.Tensor) -> object:
    scales, zeros = torch.ones(packed.shape[1]), torch.zeros(packed.shape[1], dtype=torch.int64)
    return torch.ops.onednn.qlinear_pointwise(
        x.view(torch.uint8), 1.0, 0, packed, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
    )


def _packed_by_fbgemm(weight: torch.Tensor, rows: int) -> torch.Tensor:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        packed: torch.Tensor = torch.ops.quantized.linear_prepack(
            torch._make_per_tensor_quantized_tensor(weight, 1.0, 0), None
        )
        return packed
    finally:
        torch.backends.quantized.engine = before


def _by_fbgemm(x: torch.Tensor, packed: torch.Tensor) -> object:
    return torch.ops.quantized.linear_dynamic(x.float(), packed)


def _by_numpy(x: torch.Tensor, weight: torch.Tensor) -> object:
    return np.matmul(x.numpy(), weight.numpy().T)


@torch.inference_mode()
def _samples(way: _Way, weights: torch.Tensor, rows: int) -> list[float]:
    """FLOP/s of each repetition after a warm-up, at least one, in rotation over weights [copies, n, k]."""
    copies, n, k = weights.shape
    x = _filled((rows, k), weights.dtype)
    rotation = itertools.cycle([way.prepare(weight, rows) for weight in weights[: min(copies, _REPETITIONS + 1)]])
    way.multiply(x, next(rotation))
    samples: list[float] = []
    began = time.perf_counter()
    while not samples or (len(samples) < _REPETITIONS and time.perf_counter() - began < _POINT_S):
        weight = next(rotation)
        start = time.perf_counter()
        way.multiply(x, weight)
        samples.append(2 * rows * k * n / (time.perf_counter() - start))
    return samples
