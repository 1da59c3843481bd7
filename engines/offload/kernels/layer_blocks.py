"""One layer's KV blocks as attention reads them: resident, or staged for the pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Target:
    """Where new tokens are written: `tokens` [n] of a batch, or all (None), to slot `offsets` [n] of `blocks` [n].

    `staged`: `blocks` counts the staged blocks, not the resident ones.
    """

    tokens: torch.Tensor | None
    blocks: torch.Tensor
    offsets: torch.Tensor
    staged: bool


def targets_of(tokens: torch.Tensor | None, blocks: torch.Tensor, offsets: torch.Tensor, resident: int) -> list[Target]:
    """Splits the writes of `tokens` (None: all) to `blocks` into resident and staged ones: those from `resident` on."""
    staged = blocks >= resident
    if not staged.any():
        return [Target(tokens, blocks, offsets, False)]
    rows = torch.arange(len(blocks)) if tokens is None else tokens
    parts = ((~staged, 0, False), (staged, resident, True))
    return [Target(rows[m], blocks[m] - first, offsets[m], flag) for m, first, flag in parts if m.any()]


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
    """Keys and values as stored, keys first in each block: `rows` [blocks, 2, kv_heads, BLOCK_SIZE, head_dim or
    row_bytes].

    Block numbers from len(rows) on are those of `staged`, whose blocks have the same shape.
    """

    rows: torch.Tensor
    staged: torch.Tensor | None = None

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """Copies n blocks, [n, 2, kv_heads, BLOCK_SIZE, ...]."""
        resident = len(self.rows)
        if self.staged is None:
            return self.rows[blocks]
        staged = self.staged[(blocks - resident).clamp(min=0)]
        if not resident:
            return staged
        # indexing by a mask would make a device tell the host how many of each there are
        return torch.where((blocks < resident).view(-1, 1, 1, 1, 1), self.rows[blocks.clamp(max=resident - 1)], staged)

    def addresses(self, table: torch.Tensor) -> torch.Tensor:
        """The address of each block in a block table, int64, shaped alike."""
        table = table.long()
        resident = _addresses(self.rows, table)
        if self.staged is None:
            return resident
        staged = table - len(self.rows)
        return torch.where(staged < 0, resident, _addresses(self.staged, staged.clamp(min=0)))

    def put(self, which: int, targets: Sequence[Target], new: torch.Tensor) -> None:
        """Writes keys (`which` 0) or values (1) `new` [tokens, kv_heads, ...]."""
        for target in targets:
            to = self.staged if target.staged else self.rows
            assert to is not None
            to[:, which][target.blocks, :, target.offsets] = new if target.tokens is None else new[target.tokens]


def _addresses(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return index * (rows.stride(0) * rows.itemsize) + rows.data_ptr()
