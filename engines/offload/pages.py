"""How many pages of the cache hold how many tokens: arithmetic only, without torch."""

from __future__ import annotations

from harness.api import ModelShape

#: Tokens a page holds: half a page is lost per sequence, and a table entry is kept for each.
PAGE_TOKENS = 8


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


def page_bytes(shape: ModelShape, itemsize: int) -> int:
    """Bytes of one page over all layers, keys and values."""
    return PAGE_TOKENS * shape.kv_bytes_per_token(itemsize)
