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
from engines.offload.kernels.gemm import Gemm, compiled_gemm
from engines.offload.kernels.kernel_sets import HostKernels
from engines.offload.kernels.quantizer import Quantizer, compiled_quantizer, numba_quantizer, reference_quantizer
from engines.offload.memory.storage import Grouped, Plain, Storage

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
#: One decoder layer of opt-1.3b: rows and columns of its matrices.
_LAYER = ((2048, 2048),) * 4 + ((8192, 2048), (2048, 8192))


def main() -> None:
    """Prints the tables as Markdown; takes minutes on two cores. Exits with one line where there is no compiler."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        try:
            lines = [*_attention(Path(folder), threads), "", *_gemm(Path(folder), threads), "",
                     *_quantizers(Path(folder), threads)]  # fmt: skip
        except NoCompilerError as exc:
            sys.exit(f"no compiled kernels here: {exc}")
    sys.stdout.write(f"{os.cpu_count()} cores, {threads} threads; median of {_ROUNDS} interleaved rounds (lowest to "
                     "highest)\n\n" + "\n".join(lines) + "\n")  # fmt: skip


def _attention(cache: Path, threads: int) -> Iterator[str]:
    yield "| attention of one new token | bytes | GB/s of them | of the bound | bound |"
    yield "| --- | --- | --- | --- | --- |"
    kernels = HostKernels(cache, threads)
    source = torch.zeros(1 << 26)
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


def _gemm(cache: Path, threads: int) -> Iterator[str]:
    """A layer's GEMMs at 256 and at few rows, and the cost of unpacking its weights: GEMMs of 0 rows."""
    yield "| one layer of opt-1.3b, 256 rows | GFLOP/s | unpacking, part of the float32 product |"
    yield "| --- | --- | --- |"
    kinds: dict[str, Storage] = {
        "32 bit": Plain("float32"),
        **_KINDS,
        "4 bit, groups along outputs": Grouped(4, 64, group_axis=0),
    }
    layers = {kind: _layer(stored, cache, threads) for kind, stored in kinds.items()}
    seconds = interleaved(
        {f"{kind} {rows}": _multiply(layers[kind], rows) for kind in kinds for rows in (0, 256)}, _ROUNDS
    )
    flops = 2 * 256 * sum(n * k for n, k in _LAYER)
    whole = statistics.median(seconds["32 bit 256"])
    for kind in kinds:
        unpacking = statistics.median(seconds[f"{kind} 0"]) / whole
        yield f"| {kind} | {_spread(flops / 1e9, seconds[f'{kind} 256'])} | {unpacking:.1%} |"
    yield ""
    yield "| few rows | 16 bit | 4 bit | torch's int4 (bfloat16 activations) |"
    yield "| --- | --- | --- | --- |"
    fused = _fused()
    for rows in (1, 4, 8, 16, 32):
        work = {kind: _multiply(layers[kind], rows) for kind in ("16 bit", "4 bit")}
        seconds = interleaved(work | {"fused": partial(fused, rows)}, _ROUNDS)
        cells = " | ".join(f"{_spread(1e-3, seconds[kind], inverse=True)} ms" for kind in (*work, "fused"))
        yield f"| {rows} | {cells} |"


def _layer(stored: Storage, cache: Path, threads: int) -> tuple[Gemm, Sequence[tuple[torch.Tensor, int, int]]]:
    gemm = compiled_gemm(stored, cache, threads)
    weights = []
    for n, k in _LAYER:
        weight = torch.randn(n, k) * 0.02
        if isinstance(stored, Plain):
            packed = weight.to(getattr(torch, stored.dtype))
        else:
            packed = compiled_quantizer(stored, cache, threads).pack(weight if stored.group_axis else weight.T)
        weights.append((packed, n, k))
    return gemm, weights


def _multiply(layer: tuple[Gemm, Sequence[tuple[torch.Tensor, int, int]]], rows: int) -> Work:
    gemm, weights = layer
    operands = [(torch.randn(rows, k), weight, torch.empty(rows, n)) for weight, n, k in weights]

    def work() -> None:
        for x, weight, out in operands:
            gemm(x, weight, None, out)

    return work


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
