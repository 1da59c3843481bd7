"""One layer's pages of the cache as attention meets them: in memory, or staged there from disk for a pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerPages:
    """Keys and values as they are stored: `rows` [pages, 2, kv_heads, PAGE_TOKENS, head_dim or row_bytes].

    Of each page the keys come first. Pages from len(rows) on are at `slots` [others] of `staged`, shaped alike.
    """

    rows: torch.Tensor
    staged: torch.Tensor | None = None
    slots: torch.Tensor | None = None

    def gather(self, pages: torch.Tensor) -> torch.Tensor:
        """[n, 2, kv_heads, PAGE_TOKENS, ...] of n pages."""
        if self.staged is None or self.slots is None:
            return self.rows[pages]
        out = self.rows.new_empty(len(pages), *self.rows.shape[1:])
        other = pages >= len(self.rows)
        out[~other] = self.rows[pages[~other]]
        out[other] = self.staged[self.slots[pages[other] - len(self.rows)]]
        return out

    def addresses(self, table: torch.Tensor) -> torch.Tensor:
        """Where each page of `table` begins in memory, int64."""
        table = table.long()
        own = _begin(self.rows, table)
        if self.staged is None or self.slots is None:
            return own
        other = table - len(self.rows)
        return torch.where(other < 0, own, _begin(self.staged, self.slots[other.clamp(min=0)]))

    def put(self, which: int, pages: torch.Tensor, offsets: torch.Tensor, new: torch.Tensor) -> None:
        """Writes keys (0) or values (1) `new` [tokens, kv_heads, ...] at `offsets` of `pages`, both [tokens]."""
        if self.staged is None or self.slots is None:
            self.rows[:, which][pages, :, offsets] = new
            return
        other = pages >= len(self.rows)
        self.rows[:, which][pages[~other], :, offsets[~other]] = new[~other]
        self.staged[:, which][self.slots[pages[other] - len(self.rows)], :, offsets[other]] = new[other]


def _begin(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return index * (rows.stride(0) * rows.itemsize) + rows.data_ptr()
