"""Keys and values of all running sequences in pages of a few tokens, so that memory follows what is really there."""

from __future__ import annotations

import torch

from engines.offload.pages import PAGE_TOKENS
from harness.api import ModelShape


class PagedCache:
    """`keys` and `values` [layers, pages, kv_heads, PAGE_TOKENS, head_dim]; a page has the same number in all layers.

    Memory is taken as pages are first written.
    """

    def __init__(self, shape: ModelShape, pages: int, dtype: torch.dtype) -> None:
        size = (shape.num_layers, pages, shape.num_kv_heads, PAGE_TOKENS, shape.head_dim)
        self.keys = torch.empty(size, dtype=dtype)
        self.values = torch.empty(size, dtype=dtype)
        self.pages = pages
        self._free = list(range(pages))[::-1]

    @property
    def free_pages(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free pages. Raises ValueError where there are fewer: the caller makes room first."""
        if count > len(self._free):
            raise ValueError(f"{count} pages wanted, {len(self._free)} are free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Frees pages."""
        self._free.extend(pages)
