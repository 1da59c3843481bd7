"""Measures a hardware profile of this host: memory, disk, arithmetic, the engine, and a device if there is one."""

import errno
import itertools
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

from engines.offload.calibrate import device as calibrate_device
from engines.offload.calibrate import engine as calibrate_engine
from engines.offload.device import cuda
from engines.offload.kernels import DeviceKernels, HostKernels, WeightPack, stored_view
from engines.offload.kernels.bench import Work, attention_of_one_token, seconds_of
from engines.offload.memory.layout import TILE_VALUES
from engines.offload.memory.rows import padded_rows
from engines.offload.memory.storage import Grouped, Panels, Plain, Storage
from engines.offload.weights import gemm
from engines.offload.weights.kept_choices import KeptChoices
from harness import api
from harness.common.buffers import direct_buffer
from harness.common.disk_rate import sequential_read_rates
from harness.common.host_memory import total_memory
from harness.common.scratch import scratch_folder
from harness.common.system import usable_cpus

#: Rows of a pass at which products are measured.
_ROWS = (1, 4, 16, 64, 256, 1024)
#: Columns of the tiles that are multiplied, and bytes of all tiles: more than a CPU's caches hold.
_WIDTH, _ROTATED = 2048, 256 << 20
#: Tiles of a round, and so few rows that dequantization dominates.
TILES, _FEW = 16, 16
_PIECE = 16 << 20
_BITS: Mapping[str, Storage] = {
    "16": Plain("bfloat16"), "8": Grouped(8, 64), "4": Grouped(4, 64), "3": Grouped(3, 64)
}  # fmt: skip
#: Decode attention: sequences, heads, key/value heads and cached tokens, of 64 columns a head.
_ATTENTION = (32, 32, 32, 512)


def measure(cache: Path, folder: Path, quick: bool, report: Callable[[str], None]) -> api.HardwareProfile:
    """A profile of this host, in a few minutes, or under one if `quick`.

    Disk rates are those of `folder`. `report` receives what is being measured. Raises DiskFullError or HarnessError if
    files cannot be written.
    """
    samples: dict[str, list[float]] = {}
    rounds = 3 if quick else 7
    threads = torch.get_num_threads()
    kernels = HostKernels(cache, threads)
    with torch.inference_mode():
        report("memory")
        samples["host.bandwidth"] = _copies(rounds)
        report("products")
        KeptChoices(cache).clear()
        product = _chosen(kernels)
        twelve = _exact12(kernels, product.dtype)
        for rows in _ROWS:
            samples[f"host.flops.{rows}"] = _products(product, rows, kernels, rounds)
            if twelve is not None:
                samples[f"host.flops_exact12.{rows}"] = _products(twelve, rows, kernels, rounds)
        report("attention of one token")
        for bits, stored in _BITS.items():
            samples[f"host.attention.{bits}"] = _attention(stored, kernels, rounds)
        report("unpacking")
        packed = gemm.choose_gemm(Grouped(4, 64), _WIDTH, [product.dtype], kernels)
        fastest = statistics.median(samples[f"host.flops.{_ROWS[-1]}"])
        samples["host.dequantize"] = _unpacking(packed, fastest, kernels, rounds)
        report("threads")
        for count in _counts(threads):
            products, attention = _on_threads(count, threads, rounds, cache)
            samples[f"host.by_threads.{count}"] = products
            samples[f"host.attention_by_threads.{count}"] = attention
    report("the engine beside its products")
    kinds: Sequence[api.Bits] = (16, 4) if quick else (16, 8, 4, 3)
    with _in_words(cache, "run a small model"):
        flops = {str(rows): statistics.median(samples[f"host.flops.{rows}"]) for rows in _ROWS}
        samples |= calibrate_engine.measure(cache, product.dtype, kinds, flops, 2 if quick else rounds)
    report("disk")
    size = (256 if quick else 1024) << 20
    with _in_words(folder, f"write and read {size >> 20} MiB there to measure the disk"):
        samples["disk.write"], samples["disk.read"] = _disk(folder, size, rounds)
    processor = link = None
    if (there := cuda.attached()) is not None:
        report("the device")
        device, name, room = there
        try:
            processor, link, of_device = calibrate_device.measure(device, name, room, DeviceKernels(), rounds)
            samples |= of_device
        except (RuntimeError, MemoryError) as exc:  # out of memory or broken: the host's rates still hold
            report(f"the device cannot be measured: {api.first_line(exc)}")
        finally:
            device.close()
    rates = {path: statistics.median(found) for path, found in samples.items()}
    return api.HardwareProfile(
        name="local",
        description=f"measured {time.strftime('%Y-%m-%d')}, products by {product.name} in {product.dtype}",
        host=api.Processor(
            name=platform.processor() or platform.machine(),
            memory=float(total_memory()),
            cores=threads,
            threads_per_core=max(1, usable_cpus() // threads),
            dtype=product.dtype,
            **calibrate_device.rates_of("host", rates),
        ),
        disk=api.Disk(float(psutil.disk_usage(str(folder)).free), **calibrate_device.rates_of("disk", rates)),
        device=processor,
        link=link,
        devices=0 if processor is None else 1,  # the engine uses one
        sources=dict.fromkeys(rates, "measured, the median") | {"host.memory": "what the system reports"},
        spread={path: (min(found), max(found)) for path, found in samples.items()},
    )


@contextmanager
def _in_words(folder: Path, what: str) -> Iterator[None]:
    """Turns an OSError into a HarnessError that says what could not be done in `folder`."""
    try:
        yield
    except OSError as exc:
        short = api.DiskFullError if exc.errno in (errno.ENOSPC, errno.EDQUOT) else api.HarnessError
        raise short(f"{folder}: cannot {what}: {exc.strerror}; free space, or give another folder by "
                    "--cache-dir") from None  # fmt: skip


def _counts(threads: int) -> list[int]:
    """Powers of two below the number of threads, and that number."""
    return sorted({*(1 << i for i in range(threads.bit_length()) if 1 << i < threads), threads})


def _copies(rounds: int) -> list[float]:
    """Bytes/s of one-way copies."""
    source = torch.ones(1 << 26)
    target = torch.ones_like(source)
    return [source.nbytes / s for s in seconds_of(lambda: target.copy_(source), rounds)]


def _chosen(kernels: HostKernels) -> gemm.GemmBackend:
    """How the engine would multiply 16-bit weights here."""
    dtypes: Sequence[api.Dtype] = ("bfloat16", "float32")
    return gemm.choose_gemm(Plain("bfloat16"), _WIDTH, dtypes, kernels)


def _exact12(kernels: HostKernels, dtype: api.Dtype) -> gemm.GemmBackend | None:
    """How it would multiply those kept in twelve bits, in `dtype`; None where it cannot."""
    with suppress(api.UnsupportedError):
        return gemm.choose_gemm(Plain("bfloat16"), _WIDTH, [dtype], kernels, exact12=True)
    return None


def _products(way: gemm.GemmBackend, rows: int, kernels: HostKernels, rounds: int) -> list[float]:
    """FLOP/s with 16-bit weights."""
    seconds = _multiplied(way, rows, kernels, rounds)
    return [2 * rows * TILE_VALUES / s for s in seconds]


def _multiplied(way: gemm.GemmBackend, rows: int, kernels: HostKernels, rounds: int) -> list[float]:
    """Seconds a tile."""
    return [s / TILES for s in seconds_of(products_of(way, rows, kernels), rounds)]


def products_of(way: gemm.GemmBackend, rows: int, kernels: HostKernels) -> Work:
    """Products of some rows with TILES tiles. Tiles alternate so that none is in a cache, as when a model runs."""
    height, stored = TILE_VALUES // _WIDTH, way.stored
    pack: WeightPack = kernels.weight_packer(stored) if isinstance(stored, Panels) else kernels.quantizer(stored).pack
    packed = pack(torch.full((height, _WIDTH), 0.01))
    assert packed is not None, "values that are alike"
    raw = packed.view(torch.uint8).flatten()
    tiles = [stored_view(raw.clone(), stored, height, _WIDTH) for _ in range(max(2, _ROTATED // len(raw)))]
    counted = rows if way.pool else padded_rows(rows, api.DTYPE_BYTES[way.dtype])
    x = torch.full((counted, _WIDTH), 0.01, dtype=getattr(torch, way.dtype))
    out = gemm.padded_output(counted, height, x)
    turns = itertools.cycle(tiles)

    def some() -> None:
        for _ in range(TILES):
            way.gemm(x, next(turns), None, out)

    return some


def _attention(stored: Storage, kernels: HostKernels, rounds: int) -> list[float]:
    """Stored bytes/s of the KV cache that decode attention reads."""
    sequences, _, kv_heads, context = _ATTENTION
    nbytes = 2 * sequences * kv_heads * context * stored.row_bytes(64)
    work = attention_of_one_token(stored, *_ATTENTION, kernels)
    return [nbytes / s for s in seconds_of(work, rounds)]


def _unpacking(way: gemm.GemmBackend, flops: float, kernels: HostKernels, rounds: int) -> list[float]:
    """4-bit values/s dequantized: a product of few rows, less its arithmetic at `flops`."""
    seconds = _multiplied(way, _FEW, kernels, rounds)
    arithmetic = 2 * _FEW * TILE_VALUES / flops
    return [TILE_VALUES / max(s - arithmetic, s / 10) for s in seconds]  # noise must not make the rate infinite


def _on_threads(count: int, threads: int, rounds: int, cache: Path) -> tuple[list[float], list[float]]:
    """FLOP/s at 256 rows, and bytes/s of decode attention in 16 bits, on `count` threads."""
    torch.set_num_threads(count)
    try:
        kernels = HostKernels(cache, count)
        return _products(_chosen(kernels), 256, kernels, rounds), _attention(_BITS["16"], kernels, rounds)
    finally:
        torch.set_num_threads(threads)


def _disk(folder: Path, size: int, rounds: int) -> tuple[list[float], list[float]]:
    """Bytes/s written and read past the page cache: written in sequence, read as beside launches."""
    buffer = direct_buffer(_PIECE)
    buffer.write(os.urandom(1 << 16) * (_PIECE >> 16))  # random: a disk may compress
    written = []
    with scratch_folder(folder) as scratch:
        path = scratch / "file"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        except OSError:  # a file system without direct I/O
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            for _ in range(2):
                began = time.perf_counter()
                for offset in range(0, size, _PIECE):
                    os.pwritev(descriptor, [buffer], offset)
                os.fsync(descriptor)
                written.append(size / (time.perf_counter() - began))
            direct = [rate for _ in range(rounds) for rate in sequential_read_rates(scratch)]
            return written, direct or [_read(descriptor, size, buffer) for _ in range(rounds)]
        finally:
            os.close(descriptor)


def _read(descriptor: int, size: int, buffer: mmap.mmap) -> float:
    """Bytes/s of a file that cannot be read past the page cache, with none of it there."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    for offset in range(0, size, _PIECE):
        os.preadv(descriptor, [buffer], offset)
    return size / (time.perf_counter() - began)
