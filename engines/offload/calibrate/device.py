"""Measures a device for plans: its memory, arithmetic and the link to it, by its own clock."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from engines.offload.device.protocol import Accelerator
from engines.offload.kernels import AttentionMetadata, stored_view
from engines.offload.kernels.attention_spec import AttentionSpec
from engines.offload.kernels.cuda import DeviceKernels
from engines.offload.kernels.layer_blocks import LayerBlocks
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.memory.storage import Grouped, Plain, Storage
from engines.offload.weights import gemm
from harness.api import Dtype, Link, Processor

_ROWS = (1, 4, 16, 64, 256, 1024, 4096)
#: Of the tiles that are multiplied, rows and columns; of copies, bytes.
_HEIGHT, _WIDTH = 8192, 4096
_COPIED = 1 << 28
#: Sequences, heads and tokens of the attention that is measured, columns of a head, and calls in a row.
_SEQUENCES, _HEADS, _CONTEXT, _DIM, _CALLS = 64, 32, 512, 128, 8


def measure(
    device: Accelerator, name: str, memory: int, kernels: DeviceKernels, rounds: int, dtype: Dtype = "float16"
) -> tuple[Processor, Link, dict[str, list[float]]]:
    """The device's rates with weights in `dtype`, the link's, and every sample by its path in a profile."""
    samples: dict[str, list[float]] = {}
    plain, packed = Plain(dtype), Grouped(4, 64)
    with torch.inference_mode():
        samples["device.bandwidth"] = _copies(device, rounds)
        for rows in _ROWS:
            seconds = _product(device, gemm.device_gemm(plain, _WIDTH, dtype, kernels.quantizer(plain), device), plain,
                               kernels, rows, rounds)  # fmt: skip
            samples[f"device.flops.{rows}"] = [2 * rows * _HEIGHT * _WIDTH / s for s in seconds]
        samples["device.dequantize"] = _unpacking(device, packed, dtype, kernels, rounds)
        for bits, stored in (("16", plain), ("4", packed)):
            samples[f"device.attention.{bits}"] = _attention(device, stored, dtype, kernels, rounds)
        samples |= _link(device, rounds)
    found = {path: statistics.median(rates) for path, rates in samples.items()}
    processor = Processor(
        name=name,
        memory=float(memory),
        bandwidth=found["device.bandwidth"],
        flops=curve(found, "device.flops."),
        attention=curve(found, "device.attention."),
        dequantize=found["device.dequantize"],
        dtype=dtype,
    )
    link = Link(found["link.h2d"], found["link.d2h"], found["link.h2d_pageable"], found["link.d2h_pageable"])
    return processor, link, samples


def curve(rates: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The rates at paths that begin so, by what follows."""
    return {path.removeprefix(prefix): rate for path, rate in rates.items() if path.startswith(prefix)}


def _seconds(device: Accelerator, work: Callable[[], object], rounds: int) -> list[float]:
    """Of each round by the device's clock; the first is not counted."""
    stamps = []
    for _ in range(rounds + 1):
        work()
        stamps.append(device.stamp())
    return [max(b - a, 1e-9) for a, b in itertools.pairwise(device.seconds(stamps))]


def _rates(device: Accelerator, amount: float, work: Callable[[], object], rounds: int) -> list[float]:
    return [amount / s for s in _seconds(device, work, rounds)]


def _copies(device: Accelerator, rounds: int) -> list[float]:
    """Bytes/s of one-way copies in its memory."""
    source = torch.zeros(_COPIED, dtype=torch.uint8, device=device.where)
    target = torch.zeros_like(source)
    return _rates(device, _COPIED, lambda: target.copy_(source), rounds)


def _packed(device: Accelerator, stored: Storage, kernels: DeviceKernels) -> torch.Tensor:
    """A weight as it is stored."""
    values = torch.full((_HEIGHT, _WIDTH), 0.01, device=device.where)
    return stored_view(kernels.quantizer(stored).pack(values).view(torch.uint8).flatten(), stored, _HEIGHT, _WIDTH)


def _product(
    device: Accelerator, way: gemm.GemmBackend, stored: Storage, kernels: DeviceKernels, rows: int, rounds: int
) -> list[float]:
    """Seconds of a product of so many rows; weights take turns, as none comes from a cache when a model runs."""
    weights = itertools.cycle([_packed(device, stored, kernels) for _ in range(4)])
    x = torch.full((rows, _WIDTH), 0.01, dtype=getattr(torch, way.dtype), device=device.where)
    out = gemm.padded_output(rows, _HEIGHT, x)
    return _seconds(device, lambda: way.gemm(x, next(weights), None, out), rounds)


def _unpacking(device: Accelerator, stored: Storage, dtype: Dtype, kernels: DeviceKernels, rounds: int) -> list[float]:
    """Values/s."""
    weight, quantizer = _packed(device, stored, kernels), kernels.quantizer(stored)
    out = torch.empty(_HEIGHT, _WIDTH, dtype=getattr(torch, dtype), device=device.where)
    return _rates(device, out.numel(), lambda: quantizer.unpack(weight, out), rounds)


def _attention(device: Accelerator, stored: Storage, dtype: Dtype, kernels: DeviceKernels, rounds: int) -> list[float]:
    """Bytes/s of keys and values as they are stored, of one new token of each sequence."""
    kernel, quantizer = kernels.attention(stored, sparse=False), kernels.quantizer(stored)
    each = _CONTEXT // BLOCK_SIZE
    values = torch.full((_SEQUENCES * each, 2, _HEADS, BLOCK_SIZE, _DIM), 0.01, device=device.where)
    blocks = LayerBlocks(quantizer.pack(values))
    table = torch.randperm(_SEQUENCES * each).view(_SEQUENCES, each).int()
    segments = AttentionMetadata.of([1] * _SEQUENCES, [_CONTEXT - 1] * _SEQUENCES, table, device.upload)
    query = torch.full((_HEADS, _SEQUENCES, _DIM), 0.01, dtype=getattr(torch, dtype), device=device.where)
    nbytes = 2 * _SEQUENCES * _HEADS * _CONTEXT * stored.row_bytes(_DIM)

    def attend() -> None:  # often enough that it takes longer than asking for it
        for _ in range(_CALLS):
            kernel(query, blocks, segments, AttentionSpec(_DIM**-0.5))

    return _rates(device, _CALLS * nbytes, attend, rounds)


def _link(device: Accelerator, rounds: int) -> dict[str, list[float]]:
    """Bytes/s each way, of pinned memory and of memory that is not, whose copies torch waits for."""
    pinned, plain = device.pinned(_COPIED), torch.zeros(_COPIED, dtype=torch.uint8)
    there = torch.zeros(_COPIED, dtype=torch.uint8, device=device.where)
    ways: dict[str, Callable[[], object]] = {
        "h2d": lambda: device.copy([(there, pinned)]).synchronize(),
        "d2h": lambda: device.copy([(pinned, there)]).synchronize(),
        "h2d_pageable": lambda: there.copy_(plain),
        "d2h_pageable": lambda: plain.copy_(there),
    }
    found = {}
    for name, work in ways.items():
        work()
        times = [_timed(work) for _ in range(rounds)]
        found[f"link.{name}"] = [_COPIED / s for s in times]
    return found


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return max(time.perf_counter() - began, 1e-9)
