"""One layer's KV blocks as attention reads them: resident, or staged for the pass."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


#: Writes rows [tokens, kv_heads, ...] of new tokens into blocks [blocks, kv_heads, BLOCK_SIZE, ...] of keys or values.
RowWriter = Callable[[torch.Tensor, Target, torch.Tensor], None]


def torch_writer(blocks: torch.Tensor, target: Target, new: torch.Tensor) -> None:
    """By torch, on any device: the reference."""
    blocks[target.blocks, :, target.offsets] = new if target.tokens is None else new[target.tokens]


def compiled_writer(cache: Path) -> RowWriter:
    """In C++, where torch's indexing would go element by element. Raises NoCompilerError where it cannot be built."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    arguments = [pointer, number, number, pointer, number, number, *[pointer] * 3, *[number] * 3]
    write_rows = function(CSRC / "kv_rows.cpp", "write_rows", arguments, cache)

    def write(blocks: torch.Tensor, target: Target, new: torch.Tensor) -> None:
        size, (_, heads, _, width) = new.itemsize, blocks.shape
        new = new if new.stride(2) == 1 else new.contiguous()
        assert new.dtype == blocks.dtype and new.shape[1:] == (heads, width) and blocks.stride()[2:] == (width, 1)
        tokens, slots, offsets = target.tokens, target.blocks, target.offsets
        assert all(index is None or (index.dtype == torch.int64 and index.is_contiguous())
                   for index in (tokens, slots, offsets))  # fmt: skip
        write_rows(
            new.data_ptr(), new.stride(0) * size, new.stride(1) * size, blocks.data_ptr(), blocks.stride(0) * size,
            blocks.stride(1) * size, None if tokens is None else tokens.data_ptr(), slots.data_ptr(),
            offsets.data_ptr(), len(slots), heads, width * size,
        )  # fmt: skip

    return write


class KVBlocks(Protocol):
    """One layer's blocks, wherever they lie in host memory."""

    @property
    def rows(self) -> torch.Tensor:
        """Some of the blocks, [blocks, 2, kv_heads, BLOCK_SIZE, head_dim or row_bytes]."""

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

    def put(self, which: int, targets: Sequence[Target], new: torch.Tensor, writer: RowWriter) -> None:
        """Writes keys (`which` 0) or values (1) `new` [tokens, kv_heads, ...]."""
        for target in targets:
            to = self.staged if target.staged else self.rows
            assert to is not None
            writer(to[:, which], target, new)


def _addresses(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return index * (rows.stride(0) * rows.itemsize) + rows.data_ptr()
