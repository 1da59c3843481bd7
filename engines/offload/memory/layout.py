"""Cuts weight matrices into tiles, and lays the tiles out in files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from engines.offload.memory.storage import Grouped, Panels, WeightStorage
from harness.api import ModelShape

#: Direct I/O requires offsets, lengths and addresses to be multiples of this.
ALIGN = 4096
#: Threads that read weights from disk.
READERS = 2
#: Reads that fill the ring: some are under way, the tiles of others wait or are multiplied. A few large reads wake
#: fewer threads than many small ones and keep a disk's queue as full.
READS = 4
#: The group, and so the file, of matrices outside the decoder layers: the head, and projections beside embeddings.
OUTSIDE = "outside"
#: Values of a tile: 4 MiB in 16 bits, so that a float32 copy stays in the CPU's last-level cache until it is
#: multiplied. Small models are cut into _TILES smaller ones, so that fractions of their weights can be placed.
TILE_VALUES, _LEAST_VALUES = 2 << 20, 16 << 10
_TILES = 256
#: Rows of a device's tiles are whole multiples: the library has no fast product whose results begin at an odd address.
_DEVICE_ROWS = 64


@dataclass(frozen=True)
class Matrix:
    """The weight W[rows, columns] of a linear layer y = x W^T.

    parameter: its name in the checkpoint.
    group: the decoder layer it belongs to, whose tiles share a file; or OUTSIDE.
    transposed: the checkpoint holds W^T, as GPT-2's do.
    expert: its index, if the parameter is a stack of experts' matrices.
    whole: (rows, columns) of the checkpoint's matrix, if W is a part of it that begins at `start`.
    """

    parameter: str
    rows: int
    columns: int
    group: str
    transposed: bool = False
    expert: int | None = None
    whole: tuple[int, int] | None = None
    start: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        """The parameter's name, with the expert's index."""
        return self.parameter if self.expert is None else f"{self.parameter}[{self.expert}]"

    @property
    def mixture(self) -> str:
        """What holds an expert's parameter: the name of its mixture."""
        return self.parameter.rpartition(".")[0]

    @property
    def in_layer(self) -> bool:
        """Whether it belongs to a decoder layer."""
        return self.group != OUTSIDE


@dataclass(frozen=True)
class WeightTile:
    """A part of a matrix: W[start:stop, :] (axis 0) or W[:, start:stop] (axis 1), contiguous in `file` at `offset`.

    `index` is its identity: its place in the order in which a pass uses the model's tiles, by which placements, rings
    and streams name it. `shape` is (rows, columns) of the part, however it is `stored`; `nbytes` its stored bytes.
    """

    index: int
    matrix: str
    axis: int
    start: int
    stop: int
    shape: tuple[int, int]
    file: str
    offset: int
    nbytes: int
    stored: WeightStorage

    @cached_property
    def span(self) -> int:
        """Bytes to read: `nbytes` rounded up to a multiple of ALIGN."""
        return aligned(self.nbytes)

    def follows(self, other: WeightTile) -> bool:
        """Whether its bytes start where `other`'s end, so that one read can take both."""
        return self.file == other.file and self.offset == other.offset + other.span


def matrices_of(shape: ModelShape) -> list[Matrix]:
    """A decoder's matrices, made up from its sizes: per layer q, k, v, o and the feed-forward's, then the head.

    There are as many experts as fill the layer's stored parameters. For plans only: the engine takes matrices and their
    order from a trace of the model itself.
    """
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = [("q", queries, shape.hidden), ("k", keys, shape.hidden), ("v", keys, shape.hidden),
                 ("o", shape.hidden, queries)]  # fmt: skip
    ups = max(1, round(shape.forward_params / (shape.hidden * shape.ffn)) - 1)
    forward = [*((f"up{i}", shape.ffn, shape.hidden) for i in range(ups)), ("down", shape.hidden, shape.ffn)]
    num_experts = round(shape.forward_stored / shape.forward_params)
    experts: Sequence[int | None] = [None] if num_experts == 1 else range(num_experts)
    sublayers = [(None, attention), *((expert, forward) for expert in experts)]
    matrices = [
        Matrix(f"layers.{layer}.{name}", rows, columns, f"layer{layer}", expert=expert)
        for layer in range(shape.num_layers)
        for expert, sublayer in sublayers
        for name, rows, columns in sublayer
    ]
    return [*matrices, Matrix("head", shape.vocab, shape.hidden, OUTSIDE)]


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


def model_tiles(
    matrices: Sequence[Matrix], layers: WeightStorage, outside: WeightStorage, tile_values: int | None = None
) -> list[WeightTile]:
    """The tiles of a model whose decoder layers are stored as `layers` and whose other matrices as `outside`."""
    stored = [layers if m.in_layer else outside for m in matrices]
    return tiles_of(matrices, stored, tile_values, rows_only=tile_values is not None)


def tiles_of(
    matrices: Sequence[Matrix], stored: Sequence[WeightStorage], tile_values: int | None = None, rows_only: bool = False
) -> list[WeightTile]:
    """The tiles of all matrices in order, one file a group, every tile page-aligned in its file.

    stored: how each matrix is stored.
    tile_values: values of a tile at most; None to derive it from the model's size.
    rows_only: matrices are cut between rows: products of columns have to be added up, which costs a device more
    launches than the product itself.
    """
    total = sum(m.rows * m.columns for m in matrices)
    size = tile_values or min(TILE_VALUES, max(_LEAST_VALUES, total // _TILES))
    ends: dict[str, int] = {}
    tiles: list[WeightTile] = []
    for matrix, storage in zip(matrices, stored, strict=True):
        file = f"{matrix.group}.bin"
        for axis, start, stop in _cuts(matrix, storage, size, rows_only):
            shape = (stop - start, matrix.columns) if axis == 0 else (matrix.rows, stop - start)
            nbytes = storage.matrix_bytes(*shape)
            offset = ends.get(file, 0)
            tiles.append(WeightTile(len(tiles), matrix.name, axis, start, stop, shape, file, offset, nbytes, storage))
            ends[file] = offset + aligned(nbytes)
    return tiles


def stored_as(tiles: Sequence[WeightTile], stored: Mapping[int, WeightStorage]) -> list[WeightTile]:
    """The same tiles, those whose index is in `stored` stored so, laid out anew."""
    ends: dict[str, int] = {}
    laid = []
    for tile in tiles:
        how = stored.get(tile.index, tile.stored)
        laid.append(replace(tile, stored=how, nbytes=how.matrix_bytes(*tile.shape), offset=ends.get(tile.file, 0)))
        ends[tile.file] = laid[-1].offset + laid[-1].span
    return laid


def matrix_spans(tiles: Sequence[WeightTile]) -> list[range]:
    """The indices of each matrix's tiles, in order."""
    starts = [i for i, (before, tile) in enumerate(itertools.pairwise(tiles), 1) if before.matrix != tile.matrix]
    return [range(start, stop) for start, stop in itertools.pairwise([0, *starts, len(tiles)])]


def joined_spans(spans: Sequence[range], joins: Sequence[Sequence[str]]) -> list[range]:
    """The tiles of matrices that are multiplied together: `spans` are the matrices' own, `joins` their names."""
    matrices = iter(spans)
    runs = [list(itertools.islice(matrices, len(join))) for join in joins]
    return [range(run[0].start, run[-1].stop) for run in runs]


def _cuts(matrix: Matrix, stored: WeightStorage, size: int, rows_only: bool) -> list[tuple[int, int, int]]:
    """(axis, start, stop) of each tile.

    The longer side is cut, as tiles near to squares reuse inputs and outputs best, and between whole groups. Panels are
    whole rows, so that their tiles' products do not have to be added up.
    """
    by_rows = rows_only or matrix.rows >= matrix.columns or isinstance(stored, Panels)
    axis, length = (0, matrix.rows) if by_rows else (1, matrix.columns)
    cut_axis = 0 if isinstance(stored, Panels) else stored.group_axis if isinstance(stored, Grouped) else 1
    grain = stored.grain if axis == cut_axis else 1
    if rows_only:
        grain = math.lcm(grain, _DEVICE_ROWS)
    grains = -(-length // grain)
    count = min(grains, -(-matrix.rows * matrix.columns // size))
    bounds = [min(length, grains * i // count * grain) for i in range(count + 1)]
    return [(axis, start, stop) for start, stop in itertools.pairwise(bounds)]
