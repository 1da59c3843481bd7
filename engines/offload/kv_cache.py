"""Keys and values of all running sequences in pages of a few tokens, so that memory follows what is really there."""

from __future__ import annotations

import torch

from harness.api import ModelShape

#: Tokens a page holds: half a page is lost per sequence, and a table entry is kept for each.
PAGE_TOKENS = 8


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
        """`count` free pages; admission sees to it that there are."""
        assert count <= len(self._free), "admission let in more than the cache holds"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Frees pages."""
        self._free.extend(pages)


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


def page_bytes(shape: ModelShape, itemsize: int) -> int:
    """Bytes of one page over all layers, keys and values."""
    return PAGE_TOKENS * shape.kv_bytes_per_token(itemsize)
