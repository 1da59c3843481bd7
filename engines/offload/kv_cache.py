"""Keys and values of all running sequences in pages of a few tokens, so that memory follows what is really there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engines.offload.kernels import Codec
from engines.offload.kv_disk import DiskPages
from engines.offload.layer_pages import LayerPages
from engines.offload.pages import PAGE_TOKENS, pages_for
from engines.offload.pool import PagePool
from engines.offload.storage import Plain, Storage
from harness.api import ModelShape


class PagedCache(PagePool):
    """Keys and values that are `stored` by `codec`; a page has the same number in all layers.

    Pages of `memory` are taken as they are first written; those after them are on `disk`. A pass says by `begin`
    which pages it needs; each of its batches goes through the layers by `layer` and `leave`.
    """

    def __init__(
        self, shape: ModelShape, memory: int, stored: Storage, codec: Codec, disk: DiskPages | None = None
    ) -> None:
        on_disk = 0 if disk is None else disk.pages
        super().__init__(memory + on_disk, on_disk)
        dtype = getattr(torch, stored.dtype) if isinstance(stored, Plain) else torch.uint8
        width = stored.row_bytes(shape.head_dim) // dtype.itemsize
        self._page_shape = (2, shape.num_kv_heads, PAGE_TOKENS, width)
        self._rows = torch.empty(shape.num_layers, memory, *self._page_shape, dtype=dtype)
        self._codec = codec
        self._disk = disk
        self._slots = torch.empty(0, dtype=torch.long)
        self._inside: list[int] = []  # by layer, the batches that have not left it

    def begin(self, parts: Sequence[tuple[Sequence[int], int, int]], batches: int) -> None:
        """A pass of so many batches, with parts (pages, tokens cached before, tokens new)."""
        if self._disk is None:
            return
        first = len(self._rows[0])
        known = {p - first for pages, cached, _ in parts for p in pages[: pages_for(cached)] if p >= first}
        touched = {
            p - first for pages, cached, new in parts for p in pages[cached // PAGE_TOKENS : pages_for(cached + new)]
            if p >= first
        }  # fmt: skip
        self._slots = self._disk.start(known, touched)
        self._inside = [batches] * len(self._rows)

    def layer(self, layer: int) -> LayerPages:
        """The pages of one layer; waits for those on disk. Raises HarnessError for what happened there."""
        if self._disk is None:
            return LayerPages(self._rows[layer])
        flat = self._disk.staged(layer).view(self._rows.dtype)
        rows = self._rows[layer]
        strides = (len(flat) // self._disk.pages, *torch.empty(self._page_shape, device="meta").stride())
        staged = flat.as_strided((self._disk.pages, *self._page_shape), strides)
        return LayerPages(rows, staged, self._slots)

    def leave(self, layer: int) -> None:
        """A batch has attended in a layer."""
        if self._disk is None:
            return
        self._inside[layer] -= 1
        if not self._inside[layer]:
            self._disk.done(layer)

    def write(
        self, to: LayerPages, pages: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Key and value [kv_heads, tokens, head_dim] of tokens that belong at `offsets` of `pages`, both [tokens]."""
        for which, new in enumerate((key, value)):
            to.put(which, pages, offsets, self._codec.pack(new.transpose(0, 1)))
