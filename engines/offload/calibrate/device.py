"""Measures a device: memory, arithmetic and attention by its own clock, and the link to it."""

import itertools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from engines.offload.device.protocol import Accelerator
from engines.offload.kernels import AttentionMetadata, AttentionSpec, DeviceKernels, stored_view
from engines.offload.kernels.bench import seconds_of
from engines.offload.kernels.layer_blocks import LayerBlocks
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.memory.storage import Grouped, Plain, Storage
from engines.offload.weights import gemm
from harness.api import Dtype, Link, Processor

_ROWS = (1, 4, 16, 64, 256, 1024, 4096)
#: Rows and columns of the weights that are multiplied, and bytes of a copy, and of one that only starts.
_HEIGHT, _WIDTH = 8192, 4096
_COPIED, _STARTED, _QUEUED = 1 << 28, 1 << 12, 64
#: Decode attention: sequences, heads, cached tokens, columns of a head, and calls between two clock stamps.
_SEQUENCES, _HEADS, _CONTEXT, _DIM, _CALLS = 64, 32, 512, 128, 8


def measure(
    device: Accelerator, name: str, memory: int, kernels: DeviceKernels, rounds: int, dtype: Dtype = "float16"
) -> tuple[Processor, Link, dict[str, list[float]]]:
    """The rates of the device, with weights in `dtype`, and of the link; and all samples by their path in a profile."""
    samples: dict[str, list[float]] = {}
    plain, packed = Plain(dtype), Grouped(4, 64)
    with torch.inference_mode():
        samples["device.bandwidth"] = _copies(device, rounds)
        product = gemm.device_gemm(plain, _WIDTH, dtype, kernels.quantizer(plain), device)
        for rows in _ROWS:
            samples[f"device.flops.{rows}"] = _product(device, product, plain, kernels, rows, rounds)
        samples["device.dequantize"] = _unpacking(device, packed, dtype, kernels, rounds)
        for bits, stored in (("16", plain), ("4", packed)):
            samples[f"device.attention.{bits}"] = _attention(device, stored, dtype, kernels, rounds)
        samples |= _link(device, rounds)
    medians = {path: statistics.median(rates) for path, rates in samples.items()}
    processor = Processor(name, float(memory), dtype=dtype, **rates_of("device", medians))
    return processor, Link(**rates_of("link", medians)), samples


def rates_of(part: str, rates: Mapping[str, float]) -> dict[str, Any]:
    """The fields of a profile's `part` from `rates` by their path, such as `host.bandwidth` or, on a curve,
    `host.flops.64`."""
    fields: dict[str, Any] = {}
    for path, rate in rates.items():
        owner, field, *point = path.split(".")
        if owner == part and point:
            fields.setdefault(field, {})[point[0]] = rate
        elif owner == part:
            fields[field] = rate
    return fields


def _rates(device: Accelerator, amount: float, work: Callable[[], object], rounds: int) -> list[float]:
    """`amount` by seconds of each round on the device's clock, after one that warms up."""
    stamps = []
    for _ in range(rounds + 1):
        work()
        stamps.append(device.stamp())
    return [amount / max(b - a, 1e-9) for a, b in itertools.pairwise(device.seconds(stamps))]


def _copies(device: Accelerator, rounds: int) -> list[float]:
    """Bytes/s copied within the device's memory."""
    source = torch.zeros(_COPIED, dtype=torch.uint8, device=device.where)
    target = torch.zeros_like(source)
    return _rates(device, _COPIED, lambda: target.copy_(source), rounds)


def _packed(device: Accelerator, stored: Storage, kernels: DeviceKernels) -> torch.Tensor:
    """A weight in its storage layout."""
    values = torch.full((_HEIGHT, _WIDTH), 0.01, device=device.where)
    return stored_view(kernels.quantizer(stored).pack(values).view(torch.uint8).flatten(), stored, _HEIGHT, _WIDTH)


def _product(
    device: Accelerator, way: gemm.GemmBackend, stored: Storage, kernels: DeviceKernels, rows: int, rounds: int
) -> list[float]:
    """FLOP/s of a product of `rows` rows. Weights alternate so that none is in a cache, as when a model runs."""
    weights = itertools.cycle([_packed(device, stored, kernels) for _ in range(4)])
    x = torch.full((rows, _WIDTH), 0.01, dtype=getattr(torch, way.dtype), device=device.where)
    out = gemm.padded_output(rows, _HEIGHT, x)
    return _rates(device, 2 * rows * _HEIGHT * _WIDTH, lambda: way.gemm(x, next(weights), None, out), rounds)


def _unpacking(device: Accelerator, stored: Storage, dtype: Dtype, kernels: DeviceKernels, rounds: int) -> list[float]:
    """Values/s dequantized."""
    weight, quantizer = _packed(device, stored, kernels), kernels.quantizer(stored)
    out = torch.empty(_HEIGHT, _WIDTH, dtype=getattr(torch, dtype), device=device.where)
    return _rates(device, out.numel(), lambda: quantizer.unpack(weight, out), rounds)


def _attention(device: Accelerator, stored: Storage, dtype: Dtype, kernels: DeviceKernels, rounds: int) -> list[float]:
    """Stored bytes/s of the KV cache that decode attention reads."""
    kernel, quantizer = kernels.attention(stored, sparse=False), kernels.quantizer(stored)
    each = _CONTEXT // BLOCK_SIZE
    values = torch.full((_SEQUENCES * each, 2, _HEADS, BLOCK_SIZE, _DIM), 0.01, device=device.where)
    blocks = LayerBlocks(quantizer.pack(values))
    table = torch.randperm(_SEQUENCES * each).view(_SEQUENCES, each).int()
    metadata = AttentionMetadata.of([1] * _SEQUENCES, [_CONTEXT - 1] * _SEQUENCES, table, device.upload)
    query = torch.full((_HEADS, _SEQUENCES, _DIM), 0.01, dtype=getattr(torch, dtype), device=device.where)
    nbytes = 2 * _SEQUENCES * _HEADS * _CONTEXT * stored.row_bytes(_DIM)

    def attend() -> None:  # often enough to outlast the launches
        for _ in range(_CALLS):
            kernel(query, blocks, metadata, AttentionSpec(_DIM**-0.5))

    return _rates(device, _CALLS * nbytes, attend, rounds)


def _link(device: Accelerator, rounds: int) -> dict[str, list[float]]:
    """Bytes/s each way, from pinned memory and from pageable memory, whose copies are synchronous; and seconds until a
    copy's first byte."""
    pinned, plain = device.pinned(_COPIED), torch.zeros(_COPIED, dtype=torch.uint8)
    there = torch.zeros(_COPIED, dtype=torch.uint8, device=device.where)
    ways: dict[str, Callable[[], object]] = {
        "h2d": lambda: device.copy([(there, pinned)]).synchronize(),
        "d2h": lambda: device.copy([(pinned, there)]).synchronize(),
        "h2d_pageable": lambda: there.copy_(plain),
        "d2h_pageable": lambda: plain.copy_(there),
    }
    rates = {f"link.{name}": [_COPIED / s for s in seconds_of(work, rounds)] for name, work in ways.items()}
    return rates | {"link.copy_s": [_queued_copy_s(device, there, pinned) for _ in range(rounds)]}


def _queued_copy_s(device: Accelerator, there: torch.Tensor, pinned: torch.Tensor) -> float:
    """Seconds of a small copy behind others, by the device's clock: the host need not wait for each."""
    spans = [device.timed_copy(there[:_STARTED], pinned[:_STARTED]) for _ in range(_QUEUED)]
    stamps = [began for began, _ in spans] + [spans[-1][1]]
    stamps[-1].synchronize()
    times = device.seconds(stamps)
    return (times[-1] - times[0]) / _QUEUED
