"""How weight matrices are cut into blocks, and where the blocks lie in files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

#: Direct I/O wants offsets, lengths and addresses at multiples of this.
ALIGN = 4096
#: Stored bytes of a block: large enough for the disk's full speed, small enough that its float32 copy stays in
#: the CPU's last-level cache between the cast and the product.
BLOCK_BYTES = 4 << 20


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


@dataclass(frozen=True)
class Block:
    """A contiguous part of a matrix in a file: W[start:stop, :] (axis 0) or W[:, start:stop] (axis 1), row-major."""

    matrix: str
    axis: int
    start: int
    stop: int
    shape: tuple[int, int]
    file: str
    offset: int
    nbytes: int

    @property
    def span(self) -> int:
        """Bytes to read: `nbytes` rounded up to whole pages."""
        return aligned(self.nbytes)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


def blocks_of(matrices: Sequence[Matrix], itemsize: int, block_bytes: int = BLOCK_BYTES) -> list[Block]:
    """The blocks of all matrices, in order, packed into one file a group with every block page-aligned."""
    ends: dict[str, int] = {}
    found = []
    for matrix in matrices:
        file = f"{matrix.group}.bin"
        for axis, start, stop in _cuts(matrix, itemsize, block_bytes):
            shape = (stop - start, matrix.columns) if axis == 0 else (matrix.rows, stop - start)
            nbytes = shape[0] * shape[1] * itemsize
            offset = ends.get(file, 0)
            found.append(Block(matrix.name, axis, start, stop, shape, file, offset, nbytes))
            ends[file] = offset + aligned(nbytes)
    return found


def _cuts(matrix: Matrix, itemsize: int, block_bytes: int) -> list[tuple[int, int, int]]:
    """(axis, start, stop) of each block. The longer side is cut: blocks near to squares reuse x and y best."""
    axis, length = (0, matrix.rows) if matrix.rows >= matrix.columns else (1, matrix.columns)
    pieces = min(length, -(-matrix.rows * matrix.columns * itemsize // block_bytes))
    bounds = [length * i // pieces for i in range(pieces + 1)]
    return [(axis, a, b) for a, b in itertools.pairwise(bounds)]
