"""How weight matrices are cut into tiles, and where the tiles lie in files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from engines.offload.memory.storage import Grouped, Storage
from harness.api import ModelShape

#: Direct I/O wants offsets, lengths and addresses at multiples of this.
ALIGN = 4096
#: Threads that read weights from disk.
READERS = 2
#: The file of matrices that are in no decoder layer: the head, and projections beside embeddings.
OUTSIDE = "outside"
#: Values of a tile: at most 4 MiB in 16 bits, whose float32 copy, where one is made, stays in the CPU's last-level
#: cache until it is multiplied; of a small model fewer, so that a part of its weights can be placed by tiles.
TILE_VALUES, _LEAST_VALUES = 2 << 20, 16 << 10
_TILES = 256


@dataclass(frozen=True)
class Matrix:
    """The weight W[rows, columns] of a linear layer y = x W^T, by its parameter's name.

    `transposed`: checkpoints hold W^T (GPT-2). `group`: the file it goes into, one for each decoder layer.
    `expert`: which one of the parameter's stack it is, where that is a stack of experts' matrices.
    """

    parameter: str
    rows: int
    columns: int
    group: str
    transposed: bool = False
    expert: int | None = None

    @property
    def name(self) -> str:
        """The parameter's name, with the number of the expert."""
        return self.parameter if self.expert is None else f"{self.parameter}[{self.expert}]"

    @property
    def in_layer(self) -> bool:
        """Whether it is a decoder layer's."""
        return self.group != OUTSIDE


@dataclass(frozen=True)
class WeightTile:
    """A part of a matrix, contiguous in a file: W[start:stop, :] (axis 0) or W[:, start:stop] (axis 1).

    `shape` is that part's own, whatever it is `stored` as.
    """

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
        """Bytes to read: `nbytes` rounded up to whole pages."""
        return aligned(self.nbytes)


def matrices_of(shape: ModelShape) -> list[Matrix]:
    """A decoder's matrices as its sizes tell: attention's queries, keys, values and output, a feed-forward's, the head.

    Of experts there are as many as all take the room of those that one token meets. What a model really has, and in
    which order, its own dry pass says (dry.py); this is for plans.
    """
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = [("q", queries, shape.hidden), ("k", keys, shape.hidden), ("v", keys, shape.hidden),
                 ("o", shape.hidden, queries)]  # fmt: skip
    ups = max(1, round(shape.forward_params / (shape.hidden * shape.ffn)) - 1)
    forward = [*((f"up{i}", shape.ffn, shape.hidden) for i in range(ups)), ("down", shape.hidden, shape.ffn)]
    times = round(shape.forward_stored / shape.forward_params)
    experts: Sequence[int | None] = [None] if times == 1 else range(times)
    found = []
    for layer in range(shape.num_layers):
        group = f"layer{layer}"
        found += [Matrix(f"layers.{layer}.{name}", rows, columns, group) for name, rows, columns in attention]
        found += [
            Matrix(f"layers.{layer}.{name}", rows, columns, group, expert=expert)
            for expert in experts
            for name, rows, columns in forward
        ]
    return [*found, Matrix("head", shape.vocab, shape.hidden, OUTSIDE)]


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


def tiles_of(matrices: Sequence[Matrix], stored: Sequence[Storage], tile_values: int | None = None) -> list[WeightTile]:
    """The tiles of all matrices, in order, packed into one file a group with every tile page-aligned.

    `stored` says how each matrix is.
    """
    total = sum(m.rows * m.columns for m in matrices)
    size = tile_values or min(TILE_VALUES, max(_LEAST_VALUES, total // _TILES))
    ends: dict[str, int] = {}
    found = []
    for matrix, how in zip(matrices, stored, strict=True):
        file = f"{matrix.group}.bin"
        for axis, start, stop in _cuts(matrix, how, size):
            shape = (stop - start, matrix.columns) if axis == 0 else (matrix.rows, stop - start)
            nbytes = how.matrix_bytes(*shape)
            offset = ends.get(file, 0)
            found.append(WeightTile(matrix.name, axis, start, stop, shape, file, offset, nbytes, how))
            ends[file] = offset + aligned(nbytes)
    return found


def _cuts(matrix: Matrix, stored: Storage, size: int) -> list[tuple[int, int, int]]:
    """(axis, start, stop) of each tile. The longer side is cut: tiles near to squares reuse x and y best."""
    axis, length = (0, matrix.rows) if matrix.rows >= matrix.columns else (1, matrix.columns)
    along = 0 if isinstance(stored, Grouped) and stored.across else 1  # the axis that groups run along
    grain = stored.grain if axis == along else 1
    places = -(-length // grain)
    pieces = min(places, -(-matrix.rows * matrix.columns // size))
    bounds = [min(length, places * i // pieces * grain) for i in range(pieces + 1)]
    return [(axis, a, b) for a, b in itertools.pairwise(bounds)]
