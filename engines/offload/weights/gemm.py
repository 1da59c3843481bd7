"""Chooses how weight tiles are multiplied: the fastest GEMM and dtype on this CPU, or a device's library.

Which is fastest depends on the CPU: bfloat16 where it has instructions for that, else float32; torch's library after a
cast, or our kernel (kernels/csrc/gemm.cpp), which needs none. So it is measured, at the first load, and kept.
"""

import copy
import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from engines.offload.device.protocol import Accelerator
from engines.offload.kernels import Gemm, HostKernels, Quantizer, WeightPack, stored_view
from engines.offload.kernels.gemm import torch_gemm
from engines.offload.kernels.tile_pool import CODED, TilePool
from engines.offload.memory.layout import TILE_VALUES
from engines.offload.memory.storage import Grouped, Panels, Plain, Storage, WeightStorage, panels_of
from engines.offload.weights.kept_choices import KeptChoices
from engines.offload.weights.torch_threads import most_torch_threads
from harness.api import DTYPE_BYTES, Arithmetic, Dtype, UnsupportedError

#: Rows at which the choice is made: a host's pass of some prompts and many decoding sequences, one of few sequences, as
#: it is not known which a load will run, and a device's pass.
_ROWS, _FEW_ROWS, _DEVICE_ROWS = 256, 4, 2048
_ROUNDS = 12
#: Rounds end sooner once all took so many seconds, a few at least: loading waits for them.
_LONGEST_S, _FEWEST_ROUNDS = 0.15, 4
#: After so many seconds torch's threads, if they spin, have gone to sleep.
_REST_S = 0.01
#: Most columns and rows of a tile that is measured.
_WIDTH, _HEIGHT = 2048, 4096
#: Values between the rows of an output. Rows a power of two apart, as in most models, map to few sets of the CPU's
#: caches: MKL wrote a product of 300 rows 15 % slower into such a matrix.
_ROW_PAD = 16
#: Panels are taken unless another way needs less than this part of their time: their pool bears other processes on the
#: CPU, and a choice that changed from one load to the next would convert the checkpoint again.
_CLEARLY_FASTER = 0.8


@dataclass(frozen=True)
class GemmBackend:
    """How weights are multiplied, and how they have to be `stored` for it. `dtype`: of activations.

    `cast_bytes`: bytes per value of a tile for the copies made before its GEMM; 0 for none. `flops`: measured FLOP/s,
    the copies' time included; 0 before it is measured. `pool`: the threads that multiply, where tiles can be added to a
    product as they arrive. `int8`: activations are rounded to eight bits for the products, whose arithmetic is in
    whole numbers.
    """

    name: str
    dtype: Dtype
    gemm: Gemm
    cast_bytes: int
    stored: WeightStorage
    flops: float = 0.0
    pool: TilePool | None = None
    int8: bool = False

    @property
    def label(self) -> str:
        """Its name among others."""
        return f"{self.name} {self.dtype}"

    @property
    def arithmetic(self) -> Arithmetic:
        """The type of the numbers that are multiplied."""
        return "int8" if self.int8 else self.dtype


def choose_gemm(
    stored: Storage,
    hidden: int,
    dtypes: Sequence[Dtype],
    kernels: HostKernels,
    exact12: bool = False,
    reproducible: bool = False,
) -> GemmBackend:
    """The fastest GEMM, for many rows and few, for weights `stored` so or in panels, about `hidden` wide, and
    activations in one of `dtypes`: as kept in the cache, or measured and kept. `exact12`: bfloat16 is to be kept in
    twelve bits. `reproducible`: a library's product of a row may depend on how many rows it is called with, so panels
    are taken where there are any: their arithmetic is the same on any threads, for any rows.

    Raises UnsupportedError for twelve bits where there are none.
    """
    quantizer = kernels.quantizer(stored)
    candidates = _as_stored(stored, dtypes, kernels)
    tiles: dict[WeightStorage, list[torch.Tensor]] = {stored: _tiles(stored, quantizer.pack, hidden)}
    panels = panels_of(stored, exact12)
    pool = kernels.tile_pool() if panels is not None else None
    if panels is not None and pool is not None and pool.dtype in dtypes:
        candidates.append(GemmBackend(panels.name, pool.dtype, pool.gemm(panels), 0, panels, pool=pool))
        tiles[panels] = _tiles(panels, kernels.weight_packer(panels), hidden)
    if reproducible and (own := [candidate for candidate in candidates if candidate.pool is not None]):
        candidates = own
    if exact12:
        candidates = [candidate for candidate in candidates if candidate.stored == Panels(exact12=True)]
    if not candidates:
        raise UnsupportedError("policy.weight_format: exact12 is for weights in bfloat16 on a host, computed in its "
                               f"fastest dtype, with compiled kernels; {kernels.note or 'leave it out'}")  # fmt: skip
    choices = KeptChoices(kernels.cache)
    offered = tuple(candidate.label for candidate in candidates)
    among = (stored, _tile_size(hidden), offered, kernels.threads)
    chosen = choices.get(*among)
    kept = [candidate for candidate in candidates if candidate.label == chosen] or candidates

    def measured(rows: int) -> list[float]:
        return _seconds_per_flop([_Trial(candidate, tiles[candidate.stored], hidden, rows) for candidate in kept])

    seconds = measured(_ROWS)
    few = measured(_FEW_ROWS) if len(kept) > 1 else seconds  # they only help to choose
    fastest, _, best = min(
        zip(seconds, few, kept, strict=True), key=lambda way: math.sqrt(way[0] * way[1]) * _handicap(way[2].stored)
    )
    if best.label != chosen:
        choices.keep(best.label, *among)
    return replace(best, flops=1 / fastest)


def in_place_gemm(stored: WeightStorage, hidden: int, dtype: Dtype, kernels: HostKernels) -> GemmBackend:
    """The host's fastest GEMM of few rows for weights about `hidden` wide that are `stored` so for a device, which
    computes in `dtype`: as kept in the cache, or measured and kept.

    Raises UnsupportedError for panels where the compiled kernels are missing.
    """
    if isinstance(stored, Panels):
        if (pool := kernels.tile_pool()) is None:
            raise UnsupportedError(f"policy.cpu_experts: weights in panels need compiled kernels; {kernels.note}")
        return GemmBackend(stored.name, pool.dtype, pool.gemm(stored), 0, stored, pool=pool)
    candidates = _as_stored(stored, sorted({"float32", dtype} - {"float16"}), kernels)
    choices, among = KeptChoices(kernels.cache), ("in place", stored, _tile_size(hidden), dtype, kernels.threads)
    kept = choices.get(*among)
    for candidate in candidates:
        if candidate.label == kept:
            return candidate
    tiles = _tiles(stored, kernels.quantizer(stored).pack, hidden)
    seconds = _seconds_per_flop([_Trial(candidate, tiles, hidden, _FEW_ROWS) for candidate in candidates])
    best = candidates[seconds.index(min(seconds))]
    choices.keep(best.label, *among)
    return best


def _as_stored(stored: Storage, dtypes: Sequence[Dtype], kernels: HostKernels) -> list[GemmBackend]:
    """The host's ways to multiply weights that are `stored` so, without converting them first."""
    quantizer = kernels.quantizer(stored)
    ways = [_torch_gemm(stored, quantizer, dtype) for dtype in dtypes]
    if "float32" in dtypes and (compiled := kernels.gemm(stored)) is not None:
        ways.append(GemmBackend("kernel", "float32", compiled, 0, stored))
    return ways


def _handicap(stored: WeightStorage) -> float:
    """A factor on the time of weights kept so, by which they are preferred."""
    return _CLEARLY_FASTER if isinstance(stored, Panels) else 1.0


def seconds_per_value(way: GemmBackend, hidden: int, kernels: HostKernels, rows: Sequence[int]) -> dict[int, float]:
    """Seconds that a value of a weight about `hidden` wide takes in one product, by rows."""
    stored = way.stored
    pack = kernels.weight_packer(stored) if isinstance(stored, Panels) else kernels.quantizer(stored).pack
    tiles = _tiles(stored, pack, hidden)
    measured = _seconds_per_flop([_Trial(way, tiles, hidden, count) for count in rows])
    return {count: 2 * count * seconds for count, seconds in zip(rows, measured, strict=True)}


def int8_gemm(stored: Storage, hidden: int, kernels: HostKernels) -> GemmBackend:
    """The GEMM in whole numbers for weights `stored` so, about `hidden` wide, with activations in the pool's dtype; its
    rate is measured. Raises UnsupportedError where there is none."""
    panels = panels_of(stored, twelve_bits=False)
    pool = kernels.tile_pool() if panels is not None and panels.name in CODED else None
    if panels is None or pool is None:
        raise UnsupportedError("policy.compute_dtype: int8 is for policy.weight_bits 8 or 4 along a matrix's inputs, "
                               f"on a host with compiled kernels; {kernels.note or 'leave it out'}")  # fmt: skip
    way = GemmBackend(f"int8 {panels.name}", pool.dtype, pool.gemm(panels, int8=True), 0, panels, pool=pool, int8=True)
    [seconds] = _seconds_per_flop([_Trial(way, _tiles(panels, kernels.weight_packer(panels), hidden), hidden)])
    return replace(way, flops=1 / seconds)


def with_plain_panels(ways: Iterable[GemmBackend]) -> dict[WeightStorage, GemmBackend]:
    """Ways to multiply by how weights are stored; with one for tiles that twelve bits cannot hold."""
    gemms = {way.stored: way for way in ways}
    for way in list(gemms.values()):
        if isinstance(way.stored, Panels) and way.stored.exact12 and way.pool is not None:
            gemms.setdefault(Panels(), replace(way, gemm=way.pool.gemm(Panels()), stored=Panels()))
    return gemms


def device_gemm(
    stored: WeightStorage, hidden: int, dtype: Dtype, quantizer: Quantizer, device: Accelerator
) -> GemmBackend:
    """The GEMM of a device's library, with weights unpacked or cast there first; its rate is measured."""
    candidate = _torch_gemm(stored, quantizer, dtype, unpacks_to_dtype=True)
    trial = _Trial(candidate, _tiles(stored, quantizer.pack, hidden, device.where), hidden, _DEVICE_ROWS)
    with torch.inference_mode():
        stamps = [device.stamp()]
        for i in range(_ROUNDS):
            trial.multiply(i)
            stamps.append(device.stamp())
    seconds = min(b - a for a, b in itertools.pairwise(device.seconds(stamps)))
    return replace(candidate, name=f"torch on {device.where.type}", flops=trial.flops / max(seconds, 1e-9))


def padded_output(rows: int, outputs: int, like: torch.Tensor, zeros: bool = True) -> torch.Tensor:
    """An uninitialized matrix [rows, outputs] in the dtype of `like`, with a gap between its rows.

    Of `zeros` for libraries: oneDNN's bfloat16 kernels for AMX read past a row's end where its columns are no multiple
    of their tiles, and multiply what is there by zero: NaN, if uninitialized memory happens to hold one.
    """
    if (rows == 1 and not zeros) or like.device.type != "cpu":  # a device's library needs neither
        return like.new_empty(rows, outputs)
    padded = like.new_empty(rows, outputs + _ROW_PAD)
    if zeros:
        padded[:, outputs:] = 0
    return padded[:, :outputs]


def _torch_gemm(
    stored: WeightStorage, quantizer: Quantizer, dtype: Dtype, unpacks_to_dtype: bool = False
) -> GemmBackend:
    """torch's GEMM, after dequantizing or casting the weight where its storage needs that.

    `unpacks_to_dtype`: the quantizer can unpack to `dtype`; otherwise it unpacks to float32.
    """
    if stored == Plain(dtype):
        return GemmBackend("torch", dtype, torch_gemm, 0, stored)
    unpacked: Dtype = dtype if unpacks_to_dtype or isinstance(stored, Plain) else "float32"
    copies = DTYPE_BYTES[dtype] + (DTYPE_BYTES[unpacked] if unpacked != dtype else 0)
    return GemmBackend("torch", dtype, _DequantizingGemm(stored, quantizer, dtype, unpacked), copies, stored)


class _DequantizingGemm:
    """Unpacks a tile to the dtype `unpacked`, casts it to `dtype` if that is another, and multiplies by torch."""

    def __init__(self, stored: WeightStorage, quantizer: Quantizer, dtype: Dtype, unpacked: Dtype) -> None:
        self._quantizer = quantizer
        self._transposed = _is_transposed(stored)
        self._dtype, self._unpacked_dtype = getattr(torch, dtype), getattr(torch, unpacked)
        # buffers, as large as the largest tile so far
        self._unpacked = torch.empty(0, dtype=self._unpacked_dtype)
        self._cast = torch.empty(0, dtype=self._dtype)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor | None, out: torch.Tensor) -> None:
        shape = (x.shape[1], out.shape[1]) if self._transposed else (out.shape[1], x.shape[1])
        count = shape[0] * shape[1]
        if self._unpacked.numel() < count:
            self._unpacked = self._cast = torch.empty(0)  # frees the old buffers first
            cast = count if self._unpacked_dtype != self._dtype else 0
            self._unpacked = torch.empty(count, dtype=self._unpacked_dtype, device=x.device)
            self._cast = torch.empty(cast, dtype=self._dtype, device=x.device)
        values = self._unpacked[:count].view(shape)
        self._quantizer.unpack(weight, values)
        if self._cast.numel():
            values = self._cast[:count].view(shape).copy_(values)
        torch_gemm(x, values.t() if self._transposed else values, start, out)


def _tile_size(hidden: int) -> tuple[int, int]:
    """Rows and columns of the tiles that are measured."""
    columns = min(hidden, _WIDTH)
    return min(TILE_VALUES // columns, _HEIGHT), columns


def _tiles(
    stored: WeightStorage, pack: WeightPack, hidden: int, device: torch.device | None = None
) -> list[torch.Tensor]:
    size = _tile_size(hidden)
    values = torch.full(size[::-1] if _is_transposed(stored) else size, 0.01, device=device)
    packed = pack(values)
    assert packed is not None, "values that are alike"
    raw = packed.view(torch.uint8)
    return [stored_view(raw.flatten().clone(), stored, *size) for _ in range(4)]


class _Trial:
    """One candidate with tiles that take turns, and torch work in between."""

    def __init__(self, candidate: GemmBackend, tiles: Sequence[torch.Tensor], hidden: int, rows: int = _ROWS) -> None:
        outputs, columns = _tile_size(hidden)
        self._tiles = tiles
        self._x = torch.full((rows, columns), 0.01, dtype=getattr(torch, candidate.dtype), device=tiles[0].device)
        self._out = torch.empty(rows, outputs, dtype=self._x.dtype, device=self._x.device)
        self._gemm = copy.copy(candidate.gemm)  # its buffers go with the trial
        self.pool = candidate.pool
        self.flops = 2 * rows * columns * outputs

    def seconds(self, turn: int) -> float:
        """One GEMM's seconds per FLOP."""
        began = time.perf_counter()
        self.multiply(turn)
        return (time.perf_counter() - began) / self.flops

    def multiply(self, turn: int) -> None:
        """One GEMM."""
        self._gemm(self._x, self._tiles[turn % len(self._tiles)], None, self._out)
        self._out += 1  # on torch's threads: a GEMM whose own threads get in their way measures slower


@torch.inference_mode()
def _seconds_per_flop(trials: Sequence[_Trial]) -> list[float]:
    """Each trial's best of several rounds; a round runs all in turn, so a disturbance meets all alike."""
    rounds: list[list[float]] = []
    ends = time.monotonic() + _LONGEST_S * len(trials)
    while len(rounds) < _FEWEST_ROUNDS or (len(rounds) < _ROUNDS and time.monotonic() < ends):
        rounds.append([_seconds(trial, len(rounds)) for trial in trials])
    return [min(column) for column in zip(*rounds, strict=True)]


def _seconds(trial: _Trial, turn: int) -> float:
    """A GEMM's seconds per FLOP, with as many threads of torch's as it would run beside."""
    threads = torch.get_num_threads()
    if (beside := most_torch_threads(trial.pool)) < threads:
        torch.set_num_threads(beside)
        time.sleep(_REST_S)
    try:
        return trial.seconds(turn)
    finally:
        torch.set_num_threads(threads)


def _is_transposed(stored: WeightStorage) -> bool:
    """Whether the rows that are stored are those of W^T."""
    return isinstance(stored, Grouped) and stored.group_axis == 0
