"""One matrix multiplied for several batches at once, tile by tile as the stream delivers it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engines.offload.kernels import Gemm
from engines.offload.kernels.tile_pool import PanelProduct
from engines.offload.memory.layout import WeightTile
from engines.offload.memory.rows import padded_rows
from engines.offload.memory.storage import Panels
from engines.offload.weights.gemm import GemmBackend, padded_output


@dataclass(frozen=True)
class GemmRequest:
    """A product that a batch needs: x [rows, columns] times the transpose of the matrix, plus a bias [outputs]."""

    matrix: str
    x: torch.Tensor
    bias: torch.Tensor | None


class JointGemm:
    """The product of one matrix of `outputs` rows, by `backend`, for all `requests`; None stands for a batch that does
    not need it.

    `parts` [rows, outputs] are the batches' own results, complete when all the matrix's tiles were added and `wait` has
    returned. A backend with a pool of threads multiplies meanwhile; without one `add` does.
    """

    def __init__(self, requests: Sequence[GemmRequest | None], outputs: int, backend: GemmBackend) -> None:
        operands = [request for request in requests if request is not None]
        self.matrix = operands[0].matrix
        self._bias = operands[0].bias
        self._x = operands[0].x
        rows = sum(len(request.x) for request in operands)
        padded = rows if backend.pool else padded_rows(rows, self._x.element_size())
        if len(operands) > 1 or padded > rows:
            self._x = padded_output(padded, self._x.shape[1], self._x)
            torch.cat([request.x for request in operands], out=self._x[:rows])
            self._x[rows:] = 0
        self._out = padded_output(padded, outputs, self._x)
        self._sum: torch.Tensor | None = None
        parts = iter(torch.split(self._out[:rows], [len(request.x) for request in operands]))
        self.parts = [None if request is None else next(parts) for request in requests]
        self._added = 0
        self._product: PanelProduct | None = None
        if backend.pool and rows:
            self._product = backend.pool.product(self._x, backend.int8)

    def add(self, tile: WeightTile, weight: torch.Tensor, gemm: Gemm) -> int:
        """Adds the contribution of one tile, whose stored values are `weight`; returns its number. `gemm` multiplies
        weights that are stored so, where the backend has no pool."""
        self._added += 1
        if len(self._x):  # else no batch wants logits of this pass
            self._add(tile, weight, gemm)
        return self._added - 1

    def _add(self, tile: WeightTile, weight: torch.Tensor, gemm: Gemm) -> None:
        span = slice(tile.start, tile.stop)
        if self._product is not None:
            assert isinstance(tile.stored, Panels)
            self._product.add(tile.stored, weight, None if self._bias is None else self._bias[span], self._out[:, span])
        elif tile.axis == 0:
            gemm(self._x, weight, None if self._bias is None else self._bias[span], self._out[:, span])
        elif self._x.dtype == torch.float32:
            gemm(self._x[:, span], weight, self._out if tile.start else self._bias, self._out)
        else:
            self._add_in_float32(gemm, self._x[:, span], weight, tile.stop == self._x.shape[1])

    def is_done(self, number: int) -> bool:
        """Whether the tile that was added as number `number` is no longer needed."""
        return self._product is None or self._product.is_done(number)

    def wait(self) -> None:
        """Returns when all tiles that were added are done."""
        if self._product is not None:
            self._product.wait()

    def close(self) -> None:
        """Waits, and ends the product. Idempotent."""
        if self._product is not None:
            self._product.close()

    def _add_in_float32(self, gemm: Gemm, x: torch.Tensor, weight: torch.Tensor, last: bool) -> None:
        """Adds a tile of columns to a float32 sum that is rounded once, as the whole product would be."""
        gemm(x, weight, None, self._out)
        self._sum = self._out.float() if self._sum is None else self._sum.add_(self._out)
        if last:
            self._out.copy_(self._sum if self._bias is None else self._sum.add_(self._bias))
