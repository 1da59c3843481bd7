"""One layer's pages of the cache as attention meets them: where they live, or staged there for a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Target:
    """Tokens that are written: `tokens` [n] of a batch, or all where that is None, at `offsets` of `pages`, both [n].

    `staged`: whether the pages are of those that are staged, and counted from the first of them.
    """

    tokens: torch.Tensor | None
    pages: torch.Tensor
    offsets: torch.Tensor
    staged: bool


def targets_of(tokens: torch.Tensor | None, pages: torch.Tensor, offsets: torch.Tensor, own: int) -> list[Target]:
    """Where `tokens`, or all, go that belong at `offsets` of `pages`, of which those from `own` on are staged."""
    other = pages >= own
    if not other.any():
        return [Target(tokens, pages, offsets, False)]
    rows = torch.arange(len(pages)) if tokens is None else tokens
    parts = ((~other, 0, False), (other, own, True))
    return [Target(rows[m], pages[m] - first, offsets[m], staged) for m, first, staged in parts if m.any()]


class Pages(Protocol):
    """One layer's pages as kernels of the host meet them."""

    @property
    def rows(self) -> torch.Tensor:
        """Some of them, [pages, 2, kv_heads, PAGE_TOKENS, head_dim or row_bytes]."""
        ...

    def gather(self, pages: torch.Tensor) -> torch.Tensor:
        """[n, 2, kv_heads, PAGE_TOKENS, ...] of n pages."""
        ...

    def addresses(self, table: torch.Tensor) -> torch.Tensor:
        """Where each page of `table` begins in memory, int64."""
        ...


@dataclass(frozen=True)
class LayerPages:
    """Keys and values as they are stored: `rows` [pages, 2, kv_heads, PAGE_TOKENS, head_dim or row_bytes].

    Of each page the keys come first. Pages from len(rows) on are those of `staged`, shaped alike.
    """

    rows: torch.Tensor
    staged: torch.Tensor | None = None

    def gather(self, pages: torch.Tensor) -> torch.Tensor:
        """[n, 2, kv_heads, PAGE_TOKENS, ...] of n pages."""
        own = len(self.rows)
        if self.staged is None:
            return self.rows[pages]
        staged = self.staged[(pages - own).clamp(min=0)]
        if not own:
            return staged
        # by no mask: a device would have to tell the host how many of each there are
        return torch.where((pages < own).view(-1, 1, 1, 1, 1), self.rows[pages.clamp(max=own - 1)], staged)

    def addresses(self, table: torch.Tensor) -> torch.Tensor:
        """Where each page of `table` begins in memory, int64."""
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
            to[:, which][target.pages, :, target.offsets] = new if target.tokens is None else new[target.tokens]


def _begin(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return index * (rows.stride(0) * rows.itemsize) + rows.data_ptr()
