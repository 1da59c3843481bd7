"""Products with freshly loaded weight tiles, in whichever way and dtype is fastest on this CPU, or on a device.

Which is fastest depends on the CPU and its maker: bfloat16 where the CPU has instructions for it, else float32; by
torch's library after a cast, or by our kernel (kernels/product.cpp), which needs none. So it is measured, at load.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engines.offload.device.protocol import Device
from engines.offload.kernels import Gemm, Kernels, Quantizer, stored_view
from engines.offload.memory.layout import TILE_VALUES
from engines.offload.memory.storage import Plain, Storage
from harness.api import DTYPE_BYTES, Dtype

#: Rows at which the choice is made: a pass of some prompts and many decoding sequences; and of a device's pass.
_ROWS, _DEVICE_ROWS = 256, 2048
_ROUNDS = 12
#: Of a tile that is measured the most rows; the tiles of narrow models are small.
_HEIGHT = 4096
#: Values between the rows of a product. Rows a power of two apart, as most models' are, fall into few sets of the
#: CPU's caches: MKL multiplied 300 rows 15 % slower into such a matrix.
_ROW_PAD = 16


@dataclass(frozen=True)
class GemmBackend:
    """How this engine multiplies with weights that are stored in one way. `dtype`: of activations.

    `cast_bytes`: of the copies that are made of a tile's value before its product; 0 where there are none. `flops`:
    FLOP/s measured, with that copying.
    """

    name: str
    dtype: Dtype
    gemm: Gemm
    cast_bytes: int
    flops: float


@dataclass(frozen=True)
class _Candidate:
    """A way to multiply: `gemm` makes it, with buffers of its own."""

    name: str
    dtype: Dtype
    gemm: Callable[[], Gemm]
    cast_bytes: int


def choose_gemm(stored: Storage, hidden: int, dtypes: Sequence[Dtype], kernels: Kernels) -> GemmBackend:
    """The fastest way with weights that are `stored` so, about `hidden` wide, and activations in one of `dtypes`."""
    ways = [_by_library(stored, kernels.quantizer(stored), dtype) for dtype in dtypes]
    if "float32" in dtypes and (compiled := kernels.gemm(stored)) is not None:
        ways.append(_Candidate("kernel", "float32", lambda: compiled, 0))
    tiles = _tiles(stored, kernels.quantizer(stored), min(hidden, 2048))
    times = _timed([_Trial(way, tiles, min(hidden, 2048)) for way in ways])
    best, way = min(zip(times, ways, strict=True), key=lambda pair: pair[0])
    return GemmBackend(way.name, way.dtype, way.gemm(), way.cast_bytes, 1 / best)


def device_gemm(stored: Storage, hidden: int, dtype: Dtype, quantizer: Quantizer, device: Device) -> GemmBackend:
    """As `choose`, of a device: what its library does with values that were unpacked or cast there."""
    way = _by_library(stored, quantizer, dtype, at_once=True)
    trial = _Trial(way, _tiles(stored, quantizer, min(hidden, 2048), device.where), min(hidden, 2048), _DEVICE_ROWS)
    with torch.inference_mode():
        stamps = [device.stamp()]
        for i in range(_ROUNDS):
            trial.multiply(i)
            stamps.append(device.stamp())
    times = device.seconds(stamps)
    seconds = min(b - a for a, b in itertools.pairwise(times))
    return GemmBackend(f"{way.name} on {device.where.type}", dtype, way.gemm(), way.cast_bytes,
                      trial.flops / max(seconds, 1e-9))  # fmt: skip


def padded_output(rows: int, outputs: int, like: torch.Tensor) -> torch.Tensor:
    """Room for a product [rows, outputs], its rows a little apart, of the same dtype as `like`."""
    return like.new_empty(rows, outputs + _ROW_PAD)[:, :outputs]


def torch_gemm(x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor | None, out: torch.Tensor) -> None:
    """With the library that torch carries."""
    if start is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(start, x, weight.t(), out=out)


def _by_library(stored: Storage, quantizer: Quantizer, dtype: Dtype, at_once: bool = False) -> _Candidate:
    """With the library that torch carries, after unpacking or a cast where there is something to unpack or to cast.

    `at_once`: the quantizer unpacks to what is multiplied, not to float32.
    """
    if stored == Plain(dtype):
        return _Candidate("torch", dtype, lambda: torch_gemm, 0)
    unpacked: Dtype = dtype if at_once or isinstance(stored, Plain) else "float32"
    copies = DTYPE_BYTES[dtype] + (DTYPE_BYTES[unpacked] if unpacked != dtype else 0)
    return _Candidate("torch", dtype, lambda: _Widened(stored, quantizer, dtype, unpacked), copies)


class _Widened:
    """A product with a tile that is first unpacked, and copied as values of the multiplied dtype."""

    def __init__(self, stored: Storage, quantizer: Quantizer, dtype: Dtype, unpacked: Dtype) -> None:
        self._quantizer = quantizer
        self._across = _is_across(stored)
        self._multiplied, self._unpacked = getattr(torch, dtype), getattr(torch, unpacked)
        # for the largest tile so far
        self._room = torch.empty(0, dtype=self._unpacked)
        self._narrow = torch.empty(0, dtype=self._multiplied)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor | None, out: torch.Tensor) -> None:
        shape = (x.shape[1], out.shape[1]) if self._across else (out.shape[1], x.shape[1])
        count = shape[0] * shape[1]
        if self._room.numel() < count:
            self._room = self._narrow = torch.empty(0)  # before there are others
            narrow = count if self._unpacked != self._multiplied else 0
            self._room = torch.empty(count, dtype=self._unpacked, device=x.device)
            self._narrow = torch.empty(narrow, dtype=self._multiplied, device=x.device)
        values = self._room[:count].view(shape)
        self._quantizer.unpack(weight, values)
        if self._narrow.numel():
            values = self._narrow[:count].view(shape).copy_(values)
        torch_gemm(x, values.t() if self._across else values, start, out)


def _tiles(stored: Storage, quantizer: Quantizer, width: int, device: torch.device | None = None) -> list[torch.Tensor]:
    height = _height(width)
    values = torch.full((width, height) if _is_across(stored) else (height, width), 0.01, device=device)
    raw = quantizer.pack(values).view(torch.uint8)
    return [stored_view(raw.flatten().clone(), stored, height, width) for _ in range(4)]


def _height(width: int) -> int:
    """Rows of a tile that is so wide."""
    return min(TILE_VALUES // width, _HEIGHT)


class _Trial:
    """One way with tiles that are multiplied in turn, with other work between them."""

    def __init__(self, way: _Candidate, tiles: Sequence[torch.Tensor], width: int, rows: int = _ROWS) -> None:
        height = _height(width)
        self._tiles = tiles
        self._x = torch.full((rows, width), 0.01, dtype=getattr(torch, way.dtype), device=tiles[0].device)
        self._out = torch.empty(rows, height, dtype=self._x.dtype, device=self._x.device)
        self._gemm = way.gemm()
        self.flops = 2 * rows * width * height

    def seconds(self, turn: int) -> float:
        """A product, by operation."""
        began = time.perf_counter()
        self.multiply(turn)
        return (time.perf_counter() - began) / self.flops

    def multiply(self, turn: int) -> None:
        """Once."""
        self._gemm(self._x, self._tiles[turn % len(self._tiles)], None, self._out)
        self._out += 1  # with torch's threads, which must not be in the way


@torch.inference_mode()
def _timed(trials: Sequence[_Trial]) -> list[float]:
    """Seconds of each by operation, the best of some rounds that take all in turn: what disturbs one disturbs all."""
    rounds = [[trial.seconds(i) for trial in trials] for i in range(_ROUNDS)]
    return [min(column) for column in zip(*rounds, strict=True)]


def _is_across(stored: Storage) -> bool:
    return not isinstance(stored, Plain) and stored.across
