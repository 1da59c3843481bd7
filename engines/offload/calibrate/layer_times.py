"""Measures a layer's operations alone, and side by side on shares of the threads, for pipelines of nano-batches.

Source: NanoFlow (Zhu et al. 2025), section 5.5, with threads of a CPU in place of a device's multiprocessors. What an
operation costs is what products lose beside it, so that a product on a share R of the units runs at R of its speed.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import median

import torch

from engines.offload.calibrate.host import TILES, products_of
from engines.offload.kernels import HostKernels
from engines.offload.kernels.bench import DIM, Work, attention_of_one_token, seconds_of
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.memory.layout import TILE_VALUES
from engines.offload.memory.storage import storages
from engines.offload.weights.gemm import GemmBackend, choose_gemm, int8_gemm
from harness.api import Dtype, LayerTimes, LocalModel, OffloadPolicy
from harness.common.disk_rate import sequential_read_rates

#: Rounds of what runs alone, and seconds for which operations run side by side.
_ROUNDS, _BESIDE_S = 5, 0.5
#: Sequences that attend at most: what more take is in proportion.
_SEQUENCES = 32
#: Shares of the threads for attention beside products, at most so many of them.
_SHARES = 4
#: The least and the most of its rate that an operation is said to keep or to lose: noise must not make it none or all.
_LEAST, _MOST = 0.02, 0.98


def layer_times(
    cache: Path, model: LocalModel, policy: OffloadPolicy, rows: int, context: int, read_s: float,
    report: Callable[[str], None],
) -> LayerTimes:  # fmt: skip
    """Times of a layer of a `model` in a pass in which `rows` sequences decode at `context` cached tokens each.

    `read_s`: seconds in which a pass reads a layer's weights, 0 where none is read. `report` is told what is measured.
    Raises UnsupportedError for products that this host does not have.
    """
    threads = min(torch.get_num_threads(), policy.threads or torch.get_num_threads())
    cached, shape, before = storages(model.dtype, policy)[2], model.shape, torch.get_num_threads()
    sequences, context = min(rows, _SEQUENCES), max(BLOCK_SIZE, context // BLOCK_SIZE * BLOCK_SIZE)
    heads, kv_heads = (max(1, count * shape.head_dim // DIM) for count in (shape.num_heads, shape.num_kv_heads))
    heads = max(1, heads // kv_heads) * kv_heads

    def products(kernels: HostKernels, count: int) -> Work:
        return products_of(_way(model, policy, kernels), count, kernels)

    def attention(kernels: HostKernels) -> Work:
        return attention_of_one_token(cached, sequences, heads, kv_heads, context, kernels)

    try:
        with torch.inference_mode(), closing(HostKernels(cache, threads)) as kernels:
            torch.set_num_threads(threads)
            report("products")
            seconds = {parts: parts * _median(products(kernels, max(1, rows // parts))) for parts in (1, 2, 4)}
            report("attention")
            attention_s = _median(attention(kernels))
            alone = {"compute": 1 / seconds[1], "memory": 1 / attention_s}
            points: dict[str, list[tuple[float, float]]] = {"memory": []}
            shares: list[tuple[float, float]] = []
            for count in _counts(threads):
                report(f"attention on {count} of {threads} threads beside products")
                with closing(HostKernels(cache, count)) as few, closing(HostKernels(cache, threads - count)) as rest:
                    rates = _side_by_side({
                        "compute": (threads - count, products(rest, rows)), "memory": (count, attention(few))
                    })  # fmt: skip
                points["memory"].append(_point(rates, alone, "memory"))
                shares.append((points["memory"][-1][0], count / threads))
            if read_s:
                report("reads from the disk beside products")
                points["disk"] = _beside_reads(Path(model.path), products(kernels, rows), threads, alone["compute"])
    finally:
        torch.set_num_threads(before)
    return LayerTimes(
        weight_s=seconds[1] / TILES / TILE_VALUES,
        attention_s=attention_s * rows / sequences,
        read_s=read_s,
        cut={parts: max(1.0, taken / seconds[1]) for parts, taken in seconds.items()},
        beside={kind: tuple(sorted(found)) for kind, found in points.items()},
        attention=tuple(sorted(shares)),
    )


def _way(model: LocalModel, policy: OffloadPolicy, kernels: HostKernels) -> GemmBackend:
    """How the layers' weights are multiplied; in plain panels where they may also be kept in twelve bits."""
    layers, hidden, dtype = storages(model.dtype, policy)[0], model.shape.hidden, policy.compute_dtype
    if dtype == "int8":
        return int8_gemm(layers, hidden, kernels)
    dtypes: list[Dtype] = [dtype] if dtype != "auto" else sorted({model.dtype, "float32"})
    return choose_gemm(layers, hidden, dtypes, kernels)


def _median(work: Work) -> float:
    return median(seconds_of(work, _ROUNDS))


def _counts(threads: int) -> list[int]:
    """Threads for attention beside products: evenly spaced, at least one for each."""
    most = min(_SHARES, threads - 1)
    return sorted({max(1, round(threads * share / (most + 1))) for share in range(1, most + 1)})


def _side_by_side(work: Mapping[str, tuple[int, Work]]) -> dict[str, float]:
    """Runs a second of each kind of work, in all while every kind runs, on so many of torch's threads."""

    def rate(threads: int, run: Work) -> float:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            run()
            began, runs = time.perf_counter(), 0
            while time.perf_counter() - began < _BESIDE_S:
                run()
                runs += 1
            return runs / (time.perf_counter() - began)

    with ThreadPoolExecutor(len(work)) as pool:
        running = {kind: pool.submit(rate, *each) for kind, each in work.items()}
        return {kind: future.result() for kind, future in running.items()}


def _point(rates: Mapping[str, float], alone: Mapping[str, float], kind: str) -> tuple[float, float]:
    """What products lost beside a kind of operation, and what that kept, as shares of their rates alone."""
    lost, kept = 1 - rates["compute"] / alone["compute"], rates[kind] / alone[kind]
    return min(_MOST, max(_LEAST, lost)), min(_MOST, max(_LEAST, kept))


def _beside_reads(folder: Path, products: Work, threads: int, alone: float) -> list[tuple[float, float]]:
    """The point of reads from the disk beside products; none where the disk cannot be read past the page cache."""
    by_itself = sequential_read_rates(folder, _BESIDE_S)
    if not by_itself:
        return []
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(sequential_read_rates, folder, _BESIDE_S)
        rates = _side_by_side({"compute": (threads, products)})
        beside = reading.result()
    return [_point(rates | {"disk": max(beside)}, {"compute": alone, "disk": max(by_itself)}, "disk")]
