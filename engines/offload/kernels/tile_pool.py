"""Products with weights in panels, on threads that share their parts and do not wait for a thread without a CPU."""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engines.offload.kernels.build import CSRC, function
from engines.offload.kernels.gemm import Gemm
from engines.offload.memory.storage import Panels
from harness.api import Dtype

#: Names of the storages that the pool multiplies, and of those for which it can take activations in eight bits: by
#: their numbers in csrc/panel_gemm.cpp, which counts the latter on after the former.
_STORED = ("panels", "panels12", "panels3", "panels4", "panels8")
CODED = ("panels4", "panels8")
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class TilePool:
    """`threads` threads, of which the caller is one: see csrc/tile_pool.h.

    `dtype`: of activations; bfloat16 where the CPU has units for it. A pool must be settled or closed before the memory
    of any weight that it multiplied is unmapped: a late thread may read it. Raises NoCompilerError where it cannot be
    built.
    """

    def __init__(self, cache: Path, threads: int) -> None:
        def find(name: str, arguments: Sequence[Any], result: Any = None) -> Any:
            found = function(CSRC / "panel_gemm.cpp", name, arguments, cache)
            found.restype = result
            return found

        self._open = find("open_product", [_POINTER, _POINTER, _SIZE, _SIZE, _SIZE], _POINTER)
        self.add_tiles = find("add_tiles", [_POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE], _SIZE)
        self.is_done = find("is_done", [_POINTER, _SIZE], _INT)
        self.wait_for = find("wait_for", [_POINTER, _SIZE])
        self._end = find("close_product", [_POINTER], _POINTER)
        self._multiply = find("multiply", [_POINTER, _POINTER, *[_SIZE] * 3, _POINTER, _SIZE, _POINTER], _INT)
        self._was_left = find("was_left", [_POINTER], _INT)
        self._settle = find("settle", [_POINTER])
        self.dtype: Dtype = "bfloat16" if find("activation_bytes", [], _INT)() == 2 else "float32"
        self.torch_dtype: torch.dtype = getattr(torch, self.dtype)
        self._handle = find("open_pool", [_INT], _POINTER)(threads)
        self._late: list[tuple[int, torch.Tensor]] = []  # operands that a late thread may still read
        self.close = weakref.finalize(self, find("close_pool", [_POINTER]), self._handle)  # idempotent

    def product(self, x: torch.Tensor) -> "PanelProduct":
        """The product of x [rows, columns] in `dtype` and the tiles of one matrix, which are added to it. x must not
        change before the first is."""
        assert x.dtype == self.torch_dtype
        x = x if x.stride(1) == 1 else x.contiguous()
        return PanelProduct(self, self._open(self._handle, x.data_ptr(), x.stride(0), *x.shape), x)

    def multiply(self, x: torch.Tensor, matrices: "Sequence[MatrixProduct]") -> None:
        """The products of x [rows, columns] in `dtype` with several matrices, complete on return; see PanelProduct.add.
        Raises MemoryError."""
        self.bind(x if x.stride(1) == 1 else x.contiguous(), matrices)()

    def bind(self, x: torch.Tensor, matrices: "Sequence[MatrixProduct]") -> Callable[[], None]:
        """What `multiply` does, for as often as it is called and with the values that x, of adjacent columns, has then.
        Its memory, the weights' and that of all `matrices` have must stay mapped."""
        size, table = x.shape, list[int]()
        assert x.dtype == self.torch_dtype and x.stride(1) == 1
        for tiles, bias, out in matrices:
            _check(size, self.torch_dtype, tiles, bias, out)
            table += [tiles.address, tiles.count, 0 if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0)]
        given = self._handle, x.data_ptr(), x.stride(0), *size, (_SIZE * len(table))(*table), len(matrices)

        def multiply() -> None:
            late = _POINTER()
            had_memory = self._multiply(*given, ctypes.byref(late))
            self._keep_late(late.value, x)
            if not had_memory:
                raise MemoryError(f"no memory for products of {len(x)} rows and {x.shape[1]} columns")

        return multiply

    def gemm(self, stored: Panels, int8: bool = False) -> Gemm:
        """Products with a single tile `stored` so; their `start` is a bias or None. `int8`: as PanelTiles has it."""

        def gemm(x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor | None, out: torch.Tensor) -> None:
            product = self.product(x)
            try:
                product.add(PanelTiles([stored], [weight], [out.shape[1]], x.shape[1], int8), start, out)
            finally:
                product.close()
                self.settle()

        return gemm

    def end(self, product: int, x: torch.Tensor) -> None:
        """Ends a product of x, which is kept as long as a thread may read it, at most until the pool is closed."""
        self._keep_late(self._end(product), x)

    def _keep_late(self, late: int | None, x: torch.Tensor) -> None:
        """`late`: what a thread that may still read x will leave, or None."""
        if self._late:
            self._late = [(left, kept) for left, kept in self._late if not self._was_left(left)]
        if late:
            self._late.append((late, x))

    def settle(self) -> None:
        """Returns when no thread reads the weights of products that have ended."""
        self._settle(self._handle)


class PanelTiles:
    """Tiles of one matrix that follow each other, ready to be added to a product in one call.

    Tile i is rows[i] rows of W [rows, columns], its bytes in `weights[i]`, `stored[i]` so: all in groups alike. `int8`:
    x is rounded to eight bits by groups of columns, as large as the weights', which are `CODED`.
    """

    def __init__(
        self, stored: Sequence[Panels], weights: Sequence[torch.Tensor], rows: Sequence[int], columns: int, int8: bool
    ) -> None:
        self.count, self.rows, self.columns = len(rows), sum(rows), columns
        self._weights = weights  # keeps the memory that is pointed at
        table = []
        for panels, weight, n in zip(stored, weights, rows, strict=True):
            assert weight.nbytes == panels.matrix_bytes(n, columns) and weight.is_contiguous()
            kind = len(_STORED) + CODED.index(panels.name) if int8 else _STORED.index(panels.name)
            table += [kind, weight.data_ptr(), panels.grouped.group if panels.grouped else 0, n]
        self.table = (_SIZE * len(table))(*table)
        self.address = ctypes.addressof(self.table)


#: Tiles of one matrix W, its bias [rows] or None, and out [x's rows, W's rows], which becomes x W^T + bias.
MatrixProduct = tuple[PanelTiles, torch.Tensor | None, torch.Tensor]


def _check(
    x_size: Sequence[int], dtype: torch.dtype, tiles: PanelTiles, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    rows, columns = x_size
    assert out.shape == (rows, tiles.rows) and tiles.columns == columns
    assert out.stride(1) == 1 and out.dtype == dtype
    assert bias is None or (bias.shape == (tiles.rows,) and bias.is_contiguous() and bias.dtype == dtype)


class PanelProduct:
    """x times the transpose of one matrix, on a pool's threads. Each tile is some rows of the matrix."""

    def __init__(self, pool: TilePool, handle: int, x: torch.Tensor) -> None:
        self._pool = pool
        self._x = x
        self._handle: int | None = handle
        self._tiles = 0

    def add(self, tiles: PanelTiles, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Starts with out [rows, tiles.rows] = x W^T + bias [tiles.rows] for the next tiles W of the matrix.

        `out` must be kept until they are done, their weights as TilePool says. Raises MemoryError.
        """
        _check(self._x.shape, self._pool.torch_dtype, tiles, bias, out)
        added = self._pool.add_tiles(
            self._handle, tiles.table, tiles.count, None if bias is None else bias.data_ptr(), out.data_ptr(),
            out.stride(0),
        )  # fmt: skip
        self._tiles += added
        if added < tiles.count:
            raise MemoryError(f"no memory for a product of {len(out)} rows and {self._x.shape[1]} columns")

    def is_done(self, tile: int) -> bool:
        """Whether tile number `tile`, in the order of `add`, is done."""
        return self._handle is None or bool(self._pool.is_done(self._handle, tile))

    @property
    def is_complete(self) -> bool:
        """Whether the last tile that was added is done."""
        return not self._tiles or self.is_done(self._tiles - 1)

    def wait(self) -> None:
        """Computes, with the other threads, until all tiles that were added are done."""
        if self._handle is not None:
            self._pool.wait_for(self._handle, self._tiles)

    def close(self) -> None:
        """Waits, and ends the product. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._pool.end(handle, self._x)
