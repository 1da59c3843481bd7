"""One layer's blocks of the cache as attention meets them: where they live, or staged there for a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Target:
    """Tokens that are written: `tokens` [n] of a batch, or all where that is None, at `offsets` of `blocks`, both [n].

    `staged`: whether the blocks are of those that are staged, and counted from the first of them.
    """

    tokens: torch.Tensor | None
    blocks: torch.Tensor
    offsets: torch.Tensor
    staged: bool


def targets_of(tokens: torch.Tensor | None, blocks: torch.Tensor, offsets: torch.Tensor, own: int) -> list[Target]:
    """Where `tokens`, or all, go that belong at `offsets` of `blocks`, of which those from `own` on are staged."""
    other = blocks >= own
    if not other.any():
        return [Target(tokens, blocks, offsets, False)]
    rows = torch.arange(len(blocks)) if tokens is None else tokens
    parts = ((~other, 0, False), (other, own, True))
    return [Target(rows[m], blocks[m] - first, offsets[m], staged) for m, first, staged in parts if m.any()]


class KVBlocks(Protocol):
    """One layer's blocks as kernels of the host meet them."""

    @property
    def rows(self) -> torch.Tensor:
        """Some of them, [blocks, 2, kv_heads, BLOCK_SIZE, head_dim or row_bytes]."""
        ...

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """[n, 2, kv_heads, BLOCK_SIZE, ...] of n blocks."""
        ...

    def addresses(self, table: torch.Tensor) -> torch.Tensor:
        """Where each block of `table` begins in memory, int64."""
        ...


@dataclass(frozen=True)
class LayerBlocks:
    """Keys and values as they are stored: `rows` [blocks, 2, kv_heads, BLOCK_SIZE, head_dim or row_bytes].

    Of each block the keys come first. Blocks from len(rows) on are those of `staged`, shaped alike.
    """

    rows: torch.Tensor
    staged: torch.Tensor | None = None

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """[n, 2, kv_heads, BLOCK_SIZE, ...] of n blocks."""
        own = len(self.rows)
        if self.staged is None:
            return self.rows[blocks]
        staged = self.staged[(blocks - own).clamp(min=0)]
        if not own:
            return staged
        # by no mask: a device would have to tell the host how many of each there are
        return torch.where((blocks < own).view(-1, 1, 1, 1, 1), self.rows[blocks.clamp(max=own - 1)], staged)

    def addresses(self, table: torch.Tensor) -> torch.Tensor:
        """Where each block of `table` begins in memory, int64."""
        table = table.long()
        own = _begin(self.rows, table)
        if self.staged is None:
            return own
        other = table - len(self.rows)
        return torch.where(other < 0, own, _begin(self.staged, other.clamp(min=0)))

    def put(self, which: int, targets: Sequence[Target], new: torch.Tensor) -> None:
        """Writes keys (0) or values (1) `new` [tokens, kv_heads, ...]."""
        for target in targets:
            to = self.staged if target.staged else self.rows
            assert to is not None
            to[:, which][target.blocks, :, target.offsets] = new if target.tokens is None else new[target.tokens]


def _begin(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return index * (rows.stride(0) * rows.itemsize) + rows.data_ptr()
