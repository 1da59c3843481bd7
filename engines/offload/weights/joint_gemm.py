"""Matrices with one input multiplied for several batches at once, tile by tile as the stream delivers them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from engines.offload.kernels import Gemm, stored_view
from engines.offload.kernels.tile_pool import MatrixProduct, PanelProduct, PanelTiles
from engines.offload.memory.layout import WeightTile
from engines.offload.memory.rows import padded_rows
from engines.offload.memory.storage import Panels, WeightStorage
from engines.offload.weights.gemm import GemmBackend, padded_output


class GemmRequest(NamedTuple):
    """Products that a batch needs: x [rows, columns] times the transpose of each matrix, plus its bias [outputs].

    `outs` [rows, outputs]: where they go, if a pool multiplies and the batch is alone; else they get memory of their
    own."""

    matrices: Sequence[str]
    x: torch.Tensor
    biases: Sequence[torch.Tensor | None]
    outs: Sequence[torch.Tensor] | None = None


@dataclass(frozen=True)
class ResidentRun:
    """Resident tiles that follow each other in matrices with one input, ready for the pool of `backend`: by matrix,
    those from row `start` on. `indices` are the tiles' own; `whole`: they are all the tiles of these matrices."""

    parts: Sequence[tuple[str, int, PanelTiles]]
    indices: Sequence[int]
    whole: bool
    backend: GemmBackend

    def products(self, biases: Sequence[torch.Tensor | None], outs: Sequence[torch.Tensor]) -> Sequence[MatrixProduct]:
        """What a pool multiplies of whole matrices."""
        assert self.whole
        return [*zip((tiles for _, _, tiles in self.parts), biases, outs, strict=True)]


class JointGemm:
    """The products of matrices of `outputs` rows each, by `backend`, for all `requests`; None stands for a batch that
    does not need them.

    `parts` are the batches' own results, [rows, outputs] for each matrix, complete when all tiles were added and `wait`
    has returned. A backend with a pool of threads multiplies meanwhile; without one `add` does.
    """

    def __init__(self, requests: Sequence[GemmRequest | None], outputs: Sequence[int], backend: GemmBackend) -> None:
        operands = [request for request in requests if request is not None]
        self._matrices, self._x, self._biases, outs = operands[0]
        self._backend = backend
        counts = [request.x.shape[0] for request in operands]
        rows = sum(counts)
        library = backend.pool is None and self._x.device.type == "cpu"
        padded = padded_rows(rows, self._x.element_size()) if library else rows
        if len(operands) > 1 or padded > rows:
            self._x = padded_output(padded, self._x.shape[1], self._x)
            torch.cat([request.x for request in operands], out=self._x[:rows])
            if padded > rows:
                self._x[rows:] = 0
        if outs is None or library or len(operands) > 1:
            outs = [padded_output(padded, count, self._x, zeros=library) for count in outputs]
        self._outs = outs
        self.parts: list[Sequence[torch.Tensor] | None] = [self._outs]
        if len(requests) > 1 or padded > rows:
            by_operand = zip(*(torch.split(out[:rows], counts) for out in self._outs), strict=True)
            self.parts = [None if request is None else next(by_operand) for request in requests]
        self._sum: torch.Tensor | None = None  # of the matrix whose tiles are added
        self._added = 0  # tiles
        self._product: PanelProduct | None = None

    @property
    def matrix(self) -> str:
        """The first matrix."""
        return self._matrices[0]

    @cached_property
    def _of(self) -> Mapping[str, tuple[torch.Tensor | None, torch.Tensor]]:
        """By matrix: its bias and results."""
        return dict(zip(self._matrices, zip(self._biases, self._outs, strict=True), strict=True))

    def add(self, tile: WeightTile, weight: torch.Tensor, gemm: Gemm) -> int:
        """Adds the contribution of one tile, whose stored values are `weight`; returns its number. `gemm` multiplies
        weights that are stored so, where the backend has no pool."""
        self._added += 1
        if self._x.shape[0]:  # else no batch wants logits of this pass
            self._add(tile, weight, gemm)
        return self._added - 1

    def _add(self, tile: WeightTile, weight: torch.Tensor, gemm: Gemm) -> None:
        span = slice(tile.start, tile.stop)
        bias, out = self._of[tile.matrix]
        if self._backend.pool:
            assert isinstance(tile.stored, Panels)
            tiles = PanelTiles([tile.stored], [weight], [tile.shape[0]], tile.shape[1], self._backend.int8)
            self._add_panels(tile.matrix, tile.start, tiles)
        elif tile.axis == 0:
            gemm(self._x, weight, None if bias is None else bias[span], out[:, span])
        elif self._x.dtype == torch.float32:
            gemm(self._x[:, span], weight, out if tile.start else bias, out)
        else:
            self._add_in_float32(gemm, tile, weight)

    def add_run(self, run: ResidentRun) -> None:
        """Adds the contribution of the next tiles, on the backend's pool. They are done on return if they are all."""
        self._added += len(run.indices)
        if not self._x.shape[0]:
            return
        if run.whole:
            assert self._backend.pool is not None
            self._backend.pool.multiply(self._x, run.products(self._biases, self._outs))
            return
        for matrix, start, tiles in run.parts:
            self._add_panels(matrix, start, tiles)

    def _add_panels(self, matrix: str, start: int, tiles: PanelTiles) -> None:
        if self._product is None:
            assert self._backend.pool is not None
            self._product = self._backend.pool.product(self._x)
        bias, out = self._of[matrix]
        span = slice(start, start + tiles.rows)
        self._product.add(tiles, None if bias is None else bias[span], out[:, span])

    def is_done(self, number: int) -> bool:
        """Whether the tile that was added as number `number` is no longer needed."""
        return self._product is None or self._product.is_done(number)

    @property
    def is_pooled(self) -> bool:
        """Whether threads of a pool multiply what was added."""
        return self._product is not None

    @property
    def is_running(self) -> bool:
        """Whether threads multiply tiles that were added."""
        return self._product is not None and not self._product.is_complete

    def wait(self) -> None:
        """Returns when all tiles that were added are done."""
        if self._product is not None:
            self._product.wait()

    def close(self) -> None:
        """Waits, and ends the product. Idempotent."""
        if self._product is not None:
            self._product.close()

    def _add_in_float32(self, gemm: Gemm, tile: WeightTile, weight: torch.Tensor) -> None:
        """Adds a tile of columns to a float32 sum that is rounded once, as the whole product would be."""
        bias, out = self._of[tile.matrix]
        gemm(self._x[:, tile.start : tile.stop], weight, None, out)
        self._sum = self._sum.add_(out) if tile.start and self._sum is not None else out.float()
        if tile.stop == self._x.shape[1]:
            out.copy_(self._sum if bias is None else self._sum.add_(bias))


def resident_runs(
    tiles: Sequence[WeightTile],
    spans: Sequence[range],
    resident: Mapping[int, torch.Tensor],
    gemms: Mapping[WeightStorage, GemmBackend],
) -> dict[int, ResidentRun]:
    """What a pool multiplies in one call: by their first one's index, `resident` tiles (bytes by index) that follow
    each other. `spans`: the tiles of matrices with one input. Nothing where matrices are multiplied otherwise. The last
    ones are not `whole`: the caller has something to do while a pass's last product runs."""
    runs = {}
    for span in spans:
        backend = gemms[tiles[span.start].stored]
        for is_resident, indices in itertools.groupby(span, resident.__contains__) if backend.pool else ():
            if is_resident:
                run = [tiles[i] for i in indices]
                parts = [_part(list(part), resident, backend) for _, part in itertools.groupby(run, _matrix)]
                whole = len(run) == len(span) and span != spans[-1]
                runs[run[0].index] = ResidentRun(parts, [tile.index for tile in run], whole, backend)
    return runs


def _matrix(tile: WeightTile) -> str:
    return tile.matrix


def _part(
    run: Sequence[WeightTile], resident: Mapping[int, torch.Tensor], backend: GemmBackend
) -> tuple[str, int, PanelTiles]:
    """Tiles of one matrix that follow each other; see ResidentRun."""
    stored = [tile.stored for tile in run if isinstance(tile.stored, Panels)]
    weights = [stored_view(resident[tile.index], tile.stored, *tile.shape) for tile in run]
    rows, columns = [tile.shape[0] for tile in run], run[0].shape[1]
    return run[0].matrix, run[0].start, PanelTiles(stored, weights, rows, columns, backend.int8)
