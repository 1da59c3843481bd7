"""Products with weights in panels, on threads that share their parts and do not wait for a thread without a CPU."""

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engines.offload.kernels.build import CSRC, function
from engines.offload.kernels.gemm import Gemm
from engines.offload.memory.storage import Panels
from harness.api import Dtype

#: Names of the storages that the pool multiplies, and of those for which it can take activations in eight bits.
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
        arguments = [_POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE]
        self.add_tile = {name: find(f"add_{name}", arguments) for name in _STORED}
        self.add_coded_tile = {name: find(f"add_coded_{name}", arguments) for name in CODED}
        self.is_done = find("is_done", [_POINTER, _SIZE], _INT)
        self.wait_for = find("wait_for", [_POINTER, _SIZE])
        self._end = find("close_product", [_POINTER], _POINTER)
        self._was_left = find("was_left", [_POINTER], _INT)
        self._settle = find("settle", [_POINTER])
        self.dtype: Dtype = "bfloat16" if find("activation_bytes", [], _INT)() == 2 else "float32"
        self._handle = find("open_pool", [_INT], _POINTER)(threads)
        self._late: list[tuple[int, torch.Tensor]] = []  # operands that a late thread may still read
        self.close = weakref.finalize(self, find("close_pool", [_POINTER]), self._handle)  # idempotent

    def product(self, x: torch.Tensor, int8: bool = False) -> "PanelProduct":
        """The product of x [rows, columns] in `dtype` and the tiles of one matrix, which are added to it. x must not
        change before the first is.

        `int8`: x is rounded to eight bits by groups of columns, as large as the weights', which are `CODED`.
        """
        assert x.dtype == getattr(torch, self.dtype)
        x = x if x.stride(1) == 1 else x.contiguous()
        return PanelProduct(self, self._open(self._handle, x.data_ptr(), x.stride(0), *x.shape), x, int8)

    def gemm(self, stored: Panels, int8: bool = False) -> Gemm:
        """Products with a single tile `stored` so; their `start` is a bias or None. `int8`: as in `product`."""

        def gemm(x: torch.Tensor, weight: torch.Tensor, start: torch.Tensor | None, out: torch.Tensor) -> None:
            product = self.product(x, int8)
            product.add(stored, weight, start, out)
            product.close()
            self.settle()

        return gemm

    def end(self, product: int, x: torch.Tensor) -> None:
        """Ends a product of x, which is kept as long as a thread may read it, at most until the pool is closed."""
        self._late = [(late, kept) for late, kept in self._late if not self._was_left(late)]
        if late := self._end(product):
            self._late.append((late, x))

    def settle(self) -> None:
        """Returns when no thread reads the weights of products that have ended."""
        self._settle(self._handle)


class PanelProduct:
    """x times the transpose of one matrix, on a pool's threads. Each tile is some rows of the matrix."""

    def __init__(self, pool: TilePool, handle: int, x: torch.Tensor, int8: bool) -> None:
        self._pool = pool
        self._x = x
        self._add_tile = pool.add_coded_tile if int8 else pool.add_tile
        self._handle: int | None = handle
        self._tiles = 0

    def add(self, stored: Panels, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Starts with out [rows, n] = x W^T + bias [n] for the next tile W [n, columns], `stored` so as all tiles are.

        `out` must be kept until the tile is done, `weight` as TilePool says.
        """
        n = out.shape[1]
        assert weight.nbytes == stored.matrix_bytes(n, self._x.shape[1]) and weight.is_contiguous()
        assert out.stride(1) == 1 and len(out) == len(self._x) and out.dtype == getattr(torch, self._pool.dtype)
        assert bias is None or (bias.shape == (n,) and bias.is_contiguous() and bias.dtype == out.dtype)
        self._add_tile[stored.name](
            self._handle, weight.data_ptr(), stored.grouped.group if stored.grouped else 0, n,
            None if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0),
        )  # fmt: skip
        self._tiles += 1

    def is_done(self, tile: int) -> bool:
        """Whether tile number `tile`, in the order of `add`, is done."""
        return self._handle is None or bool(self._pool.is_done(self._handle, tile))

    def wait(self) -> None:
        """Computes, with the other threads, until all tiles that were added are done."""
        if self._handle is not None:
            self._pool.wait_for(self._handle, self._tiles)

    def close(self) -> None:
        """Waits, and ends the product. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._pool.end(handle, self._x)
