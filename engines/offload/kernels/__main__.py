"""`python -m engines.offload.kernels`: the speed of this host's kernels, beside the hardware's bounds."""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from engines.offload.kernels import quantize
from engines.offload.kernels.attention import compiled_attention
from engines.offload.kernels.bench import DIM, Work, attention_of_one_token, interleaved
from engines.offload.kernels.build import NoCompilerError
from engines.offload.kernels.kernel_sets import HostKernels
from engines.offload.kernels.quantizer import Quantizer, compiled_quantizer, numba_quantizer, reference_quantizer
from engines.offload.kernels.tile_pool import CODED, TilePool
from engines.offload.memory.storage import Grouped, Panels, Plain, Storage

_ROUNDS = 7
_KINDS: Mapping[str, Storage] = {
    "16 bit": Plain("bfloat16"),
    "8 bit": Grouped(8, 64),
    "4 bit": Grouped(4, 64),
    "3 bit": Grouped(3, 64),
}
#: (name, sequences, heads, key/value heads, context), heads of 64 columns.
_ATTENTIONS = (("multi-head, 512 tokens", 32, 32, 32, 512), ("multi-head, 2048 tokens", 8, 32, 32, 2048),
               ("4 heads a group, 2048 tokens", 16, 32, 8, 2048))  # fmt: skip
#: One decoder layer of opt-1.3b: rows and columns of its matrices; and how many layers, so that none is in the caches.
_LAYER = ((2048, 2048),) * 4 + ((8192, 2048), (2048, 8192))
_LAYERS = 4
#: Rows, and columns and outputs, of a product whose weights stay in the caches.
_HOT_ROWS, _HOT = 256, 1024
#: Values that are copied to find the rate of memory.
_COPIED = 1 << 26


def main() -> None:
    """Prints the tables as Markdown; takes minutes on two cores. Exits with one line where there is no compiler."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        try:
            lines = [*_attention(Path(folder), threads), "", *_products(Path(folder), threads), "",
                     *_quantizers(Path(folder), threads)]  # fmt: skip
        except NoCompilerError as exc:
            sys.exit(f"no compiled kernels here: {exc}")
    sys.stdout.write(f"{os.cpu_count()} cores, {threads} threads; median of {_ROUNDS} interleaved rounds (lowest to "
                     "highest)\n\n" + "\n".join(lines) + "\n")  # fmt: skip


def _attention(cache: Path, threads: int) -> Iterator[str]:
    yield "| attention of one new token | bytes | GB/s of them | of the bound | bound |"
    yield "| --- | --- | --- | --- | --- |"
    kernels = HostKernels(cache, threads)
    source = torch.zeros(_COPIED)
    target = torch.empty_like(source)
    square = torch.full((2048, 2048), 0.01)
    out = torch.empty_like(square)
    for name, sequences, heads, kv_heads, context in _ATTENTIONS:
        values = 2 * sequences * kv_heads * context * DIM
        flops = 4 * sequences * heads * context * DIM
        work: dict[str, Work] = {
            "copy": lambda: target.copy_(source),
            "gemm": lambda: torch.mm(square, square, out=out),
        }
        for kind, stored in _KINDS.items():
            compiled_attention(stored, cache, threads)  # raises where the reference would be timed instead
            work[kind] = attention_of_one_token(stored, sequences, heads, kv_heads, context, kernels)
        seconds = interleaved(work, _ROUNDS)
        bandwidth = source.nbytes / statistics.median(seconds["copy"])
        rate = 2 * 2048**3 / statistics.median(seconds["gemm"])
        for kind, stored in _KINDS.items():
            nbytes = values // DIM * stored.row_bytes(DIM)
            bound = max(nbytes / bandwidth, flops / rate)
            limit = f"copy {bandwidth / 1e9:.1f} GB/s" if nbytes / bandwidth > flops / rate else "multiply-adds"
            median = statistics.median(seconds[kind])
            yield (
                f"| {name}, {kind} | {nbytes / 1e6:.0f} MB | {_spread(nbytes / 1e9, seconds[kind])} | "
                f"{bound / median:.0%} | {limit} |"
            )


def _products(cache: Path, threads: int) -> Iterator[str]:
    """Products with a layer's weights in panels, out of the caches, and by other ways where there are any.

    The bound is the rate at which memory is copied, or that of the fastest library's product with weights that it has
    packed and that are in the caches, in the pool's dtype: int8 arithmetic may exceed it.
    """
    pool = TilePool(cache, threads)
    kernels = HostKernels(cache, threads)
    kinds = {"12 bit, exact": Panels(exact12=True)} | {
        kind: Panels() if isinstance(stored, Plain) else Panels(stored)
        for kind, stored in _KINDS.items()
        if isinstance(stored, Plain | Grouped)
    }
    coded = {f"{kind}, int8": stored for kind, stored in kinds.items() if stored.name in CODED}
    kinds |= coded
    panels = {kind: _panels(stored, kernels) for kind, stored in kinds.items()}
    layers = {kind: [[tile.clone() for tile in layer] for _ in range(_LAYERS)] for kind, layer in panels.items()}
    values = sum(n * k for n, k in _LAYER)
    source, library = torch.zeros(_COPIED), _library(getattr(torch, pool.dtype))
    target = torch.empty_like(source)
    yield "| a layer of opt-1.3b, rows | weights | GFLOP/s | GB/s of weights | of the bound | torch's int4, GFLOP/s |"
    yield "| ---: | --- | ---: | ---: | ---: | ---: |"
    fused = _fused()
    for rows in (1, 4, 8, 16, 64, 256):
        work: dict[str, Work] = {"copy": lambda: target.copy_(source), "library": library}
        work |= {kind: _multiply(pool, kinds[kind], layers[kind], rows, kind in coded) for kind in kinds}
        if pool.dtype == "bfloat16":
            work["fused"] = partial(fused, rows)
        seconds = interleaved(work, _ROUNDS)
        bandwidth = source.nbytes / statistics.median(seconds["copy"])
        rate = 2 * _HOT_ROWS * _HOT**2 / statistics.median(seconds["library"])
        for kind in kinds:
            nbytes, flops = sum(tile.nbytes for tile in panels[kind]), 2 * rows * values
            taken = statistics.median(seconds[kind]) / _LAYERS
            bound = max(nbytes / bandwidth, flops / rate) / taken
            other = _spread(flops / 1e9, seconds["fused"]) if kind == "4 bit" and "fused" in seconds else ""
            each = [s / _LAYERS for s in seconds[kind]]
            cells = (rows, kind, _spread(flops / 1e9, each), f"{nbytes / taken / 1e9:.1f}", f"{bound:.0%}", other)
            yield f"| {' | '.join(map(str, cells))} |"
    pool.close()


def _panels(stored: Panels, kernels: HostKernels) -> list[torch.Tensor]:
    """The layer's matrices."""
    pack, packed = kernels.weight_packer(stored), list[torch.Tensor]()
    for n, k in _LAYER:
        while (tile := pack(torch.randn(n, k) * 0.02)) is None:  # some exponents vary too much for twelve bits
            pass
        packed.append(tile)
    return packed


def _multiply(pool: TilePool, stored: Panels, layers: Sequence[Sequence[torch.Tensor]], rows: int, int8: bool) -> Work:
    """Each matrix of each layer once: a product a matrix, as in a pass."""
    dtype = getattr(torch, pool.dtype)
    operands = [(torch.randn(rows, k, dtype=dtype), torch.empty(rows, n, dtype=dtype)) for n, k in _LAYER]
    gemm = pool.gemm(stored, int8)

    def work() -> None:
        for layer in layers:
            for (x, out), weight in zip(operands, layer, strict=True):
                gemm(x, weight, None, out)

    return work


def _library(dtype: torch.dtype) -> Work:
    """The fastest product that torch has in `dtype`: many rows, with weights in the caches and packed by oneDNN."""
    x, weight = torch.randn(_HOT_ROWS, _HOT, dtype=dtype), torch.randn(_HOT, _HOT, dtype=dtype) * 0.02
    if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _HOT_ROWS)
        return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return lambda: torch.mm(x, weight)


def _fused() -> Callable[[int], object]:
    """The same layer by torch's GEMM with 4-bit weights, which takes bfloat16 activations."""
    operands = []
    for n, k in _LAYER:
        codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
        scales = torch.rand(k // 64, n, 2).bfloat16()
        operands.append((torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), scales, k))

    def work(rows: int) -> None:
        for packed, scales, k in operands:
            torch.ops.aten._weight_int4pack_mm_for_cpu(torch.ones(rows, k, dtype=torch.bfloat16), packed, 64, scales)

    return work


def _quantizers(cache: Path, threads: int) -> Iterator[str]:
    yield "| 4 bits, 4.2 million values | packing, million/s | unpacking, million/s |"
    yield "| --- | --- | --- |"
    stored = Grouped(4, 64)
    x = torch.randn(2048, 2048)
    packed, out = quantize.pack(x, stored), torch.empty_like(x)
    quantizers: dict[str, Quantizer] = {
        "C++": compiled_quantizer(stored, cache, threads),
        "torch": reference_quantizer(stored),
    }
    try:
        quantizers["numba"] = numba_quantizer(stored, threads)
    except ImportError:
        yield "| numba is not installed | | |"
    for name, quantizer in quantizers.items():
        seconds = interleaved(
            {"pack": partial(quantizer.pack, x), "unpack": partial(quantizer.unpack, packed, out)}, _ROUNDS
        )
        cells = " | ".join(_spread(x.numel() / 1e6, seconds[verb]) for verb in ("pack", "unpack"))
        yield f"| {name} | {cells} |"


def _spread(amount: float, seconds: Sequence[float], inverse: bool = False) -> str:
    """Median, lowest and highest of `amount` per second, or with `inverse` of seconds per `amount`."""
    rates = sorted(s / amount if inverse else amount / s for s in seconds)
    return f"{statistics.median(rates):.3g} ({rates[0]:.3g} to {rates[-1]:.3g})"


if __name__ == "__main__":
    main()
