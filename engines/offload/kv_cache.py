"""Keys and values of all running sequences in pages of a few tokens, so that memory follows what is really there."""

from __future__ import annotations

import torch

from engines.offload.pages import PAGE_TOKENS
from engines.offload.pool import PagePool
from harness.api import ModelShape


class PagedCache(PagePool):
    """`keys` and `values` [layers, pages, kv_heads, PAGE_TOKENS, head_dim]; a page has the same number in all layers.

    Memory is taken as pages are first written.
    """

    def __init__(self, shape: ModelShape, pages: int, dtype: torch.dtype) -> None:
        super().__init__(pages)
        size = (shape.num_layers, pages, shape.num_kv_heads, PAGE_TOKENS, shape.head_dim)
        self.keys = torch.empty(size, dtype=dtype)
        self.values = torch.empty(size, dtype=dtype)
