"""How weight matrices are cut into tiles, and where the tiles lie in files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from engines.offload.memory.storage import Grouped, Storage
from harness.api import ModelShape

#: Direct I/O needs file offsets, lengths and addresses at multiples of this.
ALIGN = 4096
#: Threads that read weights from disk.
READERS = 2
#: The group of matrices outside the decoder layers: the head, and projections next to embeddings.
OUTSIDE = "outside"
#: Values in a tile: at most 4 MiB in 16 bits, so that a float32 copy, where one is made, stays in the CPU's last-level
#: cache until it is multiplied. Small models have smaller tiles, about `_TILES`, so that fractions can be placed.
TILE_VALUES, _LEAST_VALUES = 2 << 20, 16 << 10
_TILES = 256


@dataclass(frozen=True)
class Matrix:
    """The weight W[rows, columns] of a linear layer y = x W^T, by its parameter's name.

    `transposed`: checkpoints hold W^T (GPT-2). `group`: the file its tiles go to, one per decoder layer. `expert`: its
    index, if the parameter is a stack of experts' matrices.
    """

    parameter: str
    rows: int
    columns: int
    group: str
    transposed: bool = False
    expert: int | None = None

    @property
    def name(self) -> str:
        """The parameter's name, with the expert's index."""
        return self.parameter if self.expert is None else f"{self.parameter}[{self.expert}]"

    @property
    def in_layer(self) -> bool:
        """Whether it belongs to a decoder layer."""
        return self.group != OUTSIDE


@dataclass(frozen=True)
class WeightTile:
    """A part of a matrix, W[start:stop, :] (axis 0) or W[:, start:stop] (axis 1), contiguous in a file.

    `index` is its identity: its place in the order in which a pass uses the model's tiles. Placements, rings and
    streams name tiles by it; `file` and `offset` only say where the bytes are. `shape` is the part's, however it is
    `stored`.
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
    stored: Storage

    @property
    def span(self) -> int:
        """Bytes to read: `nbytes` rounded up to a multiple of ALIGN."""
        return aligned(self.nbytes)

    def follows(self, other: WeightTile) -> bool:
        """Whether its bytes start where `other`'s end, so that one read can take both."""
        return self.file == other.file and self.offset == other.offset + other.span


def matrices_of(shape: ModelShape) -> list[Matrix]:
    """A decoder's matrices by its shape alone, for plans: attention projections, feed-forward, head.

    The number of experts is the ratio of the feed-forward's stored parameters to those that one token uses. A loaded
    model's matrices, and their order, come from its dry pass (model/dry_pass.py).
    """
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = [("q", queries, shape.hidden), ("k", keys, shape.hidden), ("v", keys, shape.hidden),
                 ("o", shape.hidden, queries)]  # fmt: skip
    ups = max(1, round(shape.forward_params / (shape.hidden * shape.ffn)) - 1)
    forward = [*((f"up{i}", shape.ffn, shape.hidden) for i in range(ups)), ("down", shape.hidden, shape.ffn)]
    times = round(shape.forward_stored / shape.forward_params)
    experts: Sequence[int | None] = [None] if times == 1 else range(times)
    matrices = []
    for layer in range(shape.num_layers):
        group = f"layer{layer}"
        matrices += [Matrix(f"layers.{layer}.{name}", rows, columns, group) for name, rows, columns in attention]
        matrices += [
            Matrix(f"layers.{layer}.{name}", rows, columns, group, expert=expert)
            for expert in experts
            for name, rows, columns in forward
        ]
    return [*matrices, Matrix("head", shape.vocab, shape.hidden, OUTSIDE)]


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


def tiles_of(matrices: Sequence[Matrix], stored: Sequence[Storage], tile_values: int | None = None) -> list[WeightTile]:
    """The tiles of `matrices`, which come in the order of use, each page-aligned in its group's file.

    `stored`: the storage of each matrix. `tile_values`: values per tile, if not the default.
    """
    total = sum(m.rows * m.columns for m in matrices)
    size = tile_values or min(TILE_VALUES, max(_LEAST_VALUES, total // _TILES))
    ends: dict[str, int] = {}
    tiles: list[WeightTile] = []
    for matrix, how in zip(matrices, stored, strict=True):
        file = f"{matrix.group}.bin"
        for axis, start, stop in _cuts(matrix, how, size):
            shape = (stop - start, matrix.columns) if axis == 0 else (matrix.rows, stop - start)
            nbytes = how.matrix_bytes(*shape)
            offset = ends.get(file, 0)
            tiles.append(WeightTile(len(tiles), matrix.name, axis, start, stop, shape, file, offset, nbytes, how))
            ends[file] = offset + aligned(nbytes)
    return tiles


def _cuts(matrix: Matrix, stored: Storage, size: int) -> list[tuple[int, int, int]]:
    """(axis, start, stop) of each tile. Cuts the longer side: tiles close to squares reuse x and y best."""
    axis, length = (0, matrix.rows) if matrix.rows >= matrix.columns else (1, matrix.columns)
    along = stored.group_axis if isinstance(stored, Grouped) else 1
    grain = stored.grain if axis == along else 1  # a cut may not split a group
    grains = -(-length // grain)
    pieces = min(grains, -(-matrix.rows * matrix.columns // size))
    bounds = [min(length, grains * i // pieces * grain) for i in range(pieces + 1)]
    return [(axis, a, b) for a, b in itertools.pairwise(bounds)]
