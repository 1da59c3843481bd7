"""One layer's KV blocks as attention reads them: resident, or staged for the pass."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from engines.offload.kernels.build import CSRC, function


@dataclass(frozen=True)
class Target:
    """Where new tokens are written: `tokens` [n] of a batch, or all (None), to slot `offsets` [n] of `blocks` [n], all
    int64.

    `staged`: `blocks` counts the staged blocks, not the resident ones.
    """

    tokens: torch.Tensor | None
    blocks: torch.Tensor
    offsets: torch.Tensor
    staged: bool

    @cached_property
    def addresses(self) -> tuple[int | None, int, int]:
        """Of `tokens`, `blocks` and `offsets`, in host memory: the same for all layers of a pass."""
        numbers = (self.tokens, self.blocks, self.offsets)
        assert all(n is None or (n.dtype == torch.int64 and n.is_contiguous()) for n in numbers)
        return None if self.tokens is None else self.tokens.data_ptr(), self.blocks.data_ptr(), self.offsets.data_ptr()


#: Writes keys and values [tokens, kv_heads, ...] of new tokens into blocks [blocks, 2, kv_heads, BLOCK_SIZE, ...], in
#: whose dtype they are stored.
RowWriter = Callable[[torch.Tensor, Target, torch.Tensor, torch.Tensor], None]


def torch_writer(blocks: torch.Tensor, target: Target, keys: torch.Tensor, values: torch.Tensor) -> None:
    """By torch, on any device: the reference."""
    for which, new in enumerate((keys, values)):
        rows = new if target.tokens is None else new[target.tokens]
        blocks[:, which][target.blocks, :, target.offsets] = rows.to(blocks.dtype)


def compiled_writer(cache: Path) -> RowWriter:
    """In C++, where torch's indexing would go element by element. Raises NoCompilerError where it cannot be built."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    arguments = [*[pointer, number, number] * 2, pointer, *[number] * 3, *[pointer] * 3, *[number] * 3, ctypes.c_int]
    write_rows = function(CSRC / "kv_rows.cpp", "write_rows", arguments, cache)

    def write(blocks: torch.Tensor, target: Target, keys: torch.Tensor, values: torch.Tensor) -> None:
        stored, (_, _, heads, _, width) = blocks.itemsize, blocks.shape
        block, half, head, *row = blocks.stride()
        rounds = keys.dtype == torch.float32 and blocks.dtype == torch.bfloat16
        if not rounds:
            keys, values = keys.to(blocks.dtype), values.to(blocks.dtype)
        keys, values = (new if new.stride(2) == 1 else new.contiguous() for new in (keys, values))
        size = keys.itemsize
        assert keys.dtype == values.dtype and row == [width, 1]
        assert keys.shape == values.shape and keys.shape[1:] == (heads, width)
        write_rows(
            keys.data_ptr(), keys.stride(0) * size, keys.stride(1) * size,
            values.data_ptr(), values.stride(0) * size, values.stride(1) * size,
            blocks.data_ptr(), block * stored, half * stored, head * stored, *target.addresses,
            target.blocks.shape[0], heads, width * stored, rounds,
        )  # fmt: skip

    return write


class KVBlocks(Protocol):
    """One layer's blocks, wherever they lie in host memory."""

    @property
    def rows(self) -> torch.Tensor:
        """Some of the blocks, [blocks, 2, kv_heads, BLOCK_SIZE, head_dim or row_bytes]."""

    @property
    def has_others(self) -> bool:
        """Whether there are blocks behind `rows`."""

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """Copies n blocks, [n, 2, kv_heads, BLOCK_SIZE, ...]."""

    def addresses(self, table: torch.Tensor) -> torch.Tensor:
        """The address of each block in a block table, int64, shaped alike."""


@dataclass(frozen=True)
class LayerBlocks:
    """Keys and values as stored, keys first in each block; see KVBlocks.

    Block numbers from len(rows) on are those of `staged`, whose blocks have the same shape.
    """

    rows: torch.Tensor
    staged: torch.Tensor | None = None

    @property
    def has_others(self) -> bool:
        return self.staged is not None

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        resident = len(self.rows)
        if self.staged is None:
            return self.rows[blocks]
        staged = self.staged[(blocks - resident).clamp(min=0)]
        if not resident:
            return staged
        # indexing by a mask would make a device tell the host how many of each there are
        return torch.where((blocks < resident).view(-1, 1, 1, 1, 1), self.rows[blocks.clamp(max=resident - 1)], staged)

    def addresses(self, table: torch.Tensor) -> torch.Tensor:
        table = table.long()
        resident = _addresses(self.rows, table)
        if self.staged is None:
            return resident
        staged = table - len(self.rows)
        return torch.where(staged < 0, resident, _addresses(self.staged, staged.clamp(min=0)))

    def put(self, targets: Sequence[Target], keys: torch.Tensor, values: torch.Tensor, writer: RowWriter) -> None:
        """Writes keys and values [tokens, kv_heads, ...]."""
        for target in targets:
            to = self.staged if target.staged else self.rows
            assert to is not None
            writer(to, target, keys, values)


def _addresses(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return index * (rows.stride(0) * rows.itemsize) + rows.data_ptr()
