"""Keys and values of all running sequences in pages of a few tokens, so that memory follows what is really there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from engines.offload.kernels import Codec
from engines.offload.kernels.layer_blocks import LayerPages, Target, targets_of
from engines.offload.kv_cache.block_manager import PagePool
from engines.offload.memory.kv_blocks import PAGE_TOKENS, pages_for
from engines.offload.memory.storage import Plain, Storage
from harness.api import ModelShape


class StagedPages(Protocol):
    """Pages with another home, which come to where attention is for a layer of a pass: kv_disk.py, kv_host.py."""

    pages: int

    def start(self, known: Iterable[int], touched: Iterable[int]) -> torch.Tensor:
        """Begins a pass: `known` pages hold something, `touched` ones will. Where each is staged, by page: [pages]."""
        ...

    def staged(self, layer: int) -> torch.Tensor:
        """The records uint8 [pages * record] of this pass's pages in a layer, in the order of `start`."""
        ...

    def done(self, layer: int) -> None:
        """All have attended to a layer."""
        ...


def page_layout(shape: ModelShape, stored: Storage) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape of one layer's page, keys and values, and what its elements are."""
    dtype = getattr(torch, stored.dtype) if isinstance(stored, Plain) else torch.uint8
    return (2, shape.num_kv_heads, PAGE_TOKENS, stored.row_bytes(shape.head_dim) // dtype.itemsize), dtype


class PagedCache(PagePool):
    """Keys and values that are `stored` by `codec`; a page has the same number in all layers.

    Pages of `memory` are on `device`, in memory that is taken as they are first written; those after them are
    `elsewhere`. A pass says by `begin` which pages it needs; each of its batches goes through the layers by `layer` and
    `leave`, with pages as `places` calls them. `attended_at_home`: single tokens need none of those elsewhere staged.
    """

    def __init__(
        self,
        shape: ModelShape,
        memory: int,
        stored: Storage,
        codec: Codec,
        elsewhere: StagedPages | None = None,
        device: torch.device | None = None,
        attended_at_home: bool = False,
    ) -> None:
        others = 0 if elsewhere is None else elsewhere.pages
        super().__init__(memory + others, others)
        self._page_shape, dtype = page_layout(shape, stored)
        self._rows = torch.empty(shape.num_layers, memory, *self._page_shape, dtype=dtype, device=device)
        self._codec = codec
        self._elsewhere = elsewhere
        self._attended_at_home = attended_at_home
        self.first_elsewhere = memory
        self._filled: set[int] = set()  # pages elsewhere that this pass writes where they are staged
        self._slots = torch.empty(0, dtype=torch.long)
        self._inside: list[int] = []  # by layer, the batches that have not left it

    def begin(self, parts: Sequence[tuple[Sequence[int], int, int]], batches: int) -> None:
        """A pass of so many batches, with parts (pages, tokens cached before, tokens new)."""
        if self._elsewhere is None:
            return
        first = self.first_elsewhere
        many = [part for part in parts if part[2] > 1 or not self._attended_at_home]
        self._filled = _touched(many, first)
        staged = [part for part in parts if not self.is_seen_at_home(part[0], part[2])]
        known = {p - first for pages, cached, _ in staged for p in pages[: pages_for(cached)] if p >= first}
        self._slots = self._elsewhere.start(known, {p - first for p in _touched(staged, first)})
        self._inside = [batches] * len(self._rows)

    def is_seen_at_home(self, pages: Sequence[int], new: int) -> bool:
        """Whether so many new tokens attend to what they have elsewhere where it is.

        Not where it is only written in this pass, by another sequence that begins alike.
        """
        if not self._attended_at_home or new > 1:
            return False
        others = [p for p in pages if p >= self.first_elsewhere]
        return bool(others) and self._filled.isdisjoint(others)

    def places(self, pages: torch.Tensor) -> torch.Tensor:
        """What `layer` calls these pages in this pass; host tensors."""
        first = self.first_elsewhere
        if self._elsewhere is None:
            return pages
        other = (pages - first).clamp(min=0).long()
        return torch.where(pages < first, pages, (first + self._slots[other]).to(pages.dtype))

    def targets(self, tokens: torch.Tensor | None, pages: torch.Tensor, offsets: torch.Tensor) -> list[Target]:
        """Where `tokens` of a batch, or all, are written that belong at `offsets` of `pages`; host tensors [n]."""
        return targets_of(tokens, self.places(pages), offsets, self.first_elsewhere)

    def layer(self, layer: int) -> LayerPages:
        """The pages of one layer; waits for those elsewhere. Raises HarnessError for what happened there."""
        if self._elsewhere is None:
            return LayerPages(self._rows[layer])
        flat = self._elsewhere.staged(layer).view(self._rows.dtype)
        rows = self._rows[layer]
        strides = (len(flat) // self._elsewhere.pages, *torch.empty(self._page_shape, device="meta").stride())
        return LayerPages(rows, flat.as_strided((self._elsewhere.pages, *self._page_shape), strides))

    def leave(self, layer: int) -> None:
        """A batch has attended in a layer."""
        if self._elsewhere is None:
            return
        self._inside[layer] -= 1
        if not self._inside[layer]:
            self._elsewhere.done(layer)

    def write(self, to: LayerPages, targets: Sequence[Target], key: torch.Tensor, value: torch.Tensor) -> None:
        """Key and value [kv_heads, tokens, head_dim] of a batch's tokens, in its order."""
        for which, new in enumerate((key, value)):
            to.put(which, targets, self._codec.pack(new.transpose(0, 1)))


def _touched(parts: Sequence[tuple[Sequence[int], int, int]], first: int) -> set[int]:
    """Pages from `first` on that parts (pages, cached, new) write to."""
    return {
        p for pages, cached, new in parts for p in pages[cached // PAGE_TOKENS : pages_for(cached + new)] if p >= first
    }
