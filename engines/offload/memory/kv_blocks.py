"""How many pages of the cache hold how many tokens: arithmetic only, without torch."""

from __future__ import annotations

from engines.offload.memory.layout import aligned
from engines.offload.memory.storage import Storage
from harness.api import ModelShape

#: Tokens a page holds: half a page is lost per sequence, and a table entry is kept for each.
PAGE_TOKENS = 8
#: Of pages with another home the layers that are staged at once: the one that is attended to, and the next.
STAGES = 2
#: Bytes of a copy from which on larger ones are no faster: pages in pinned memory lie together in so large pieces.
_PIECE = 16 << 20


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


def page_bytes(shape: ModelShape, stored: Storage) -> int:
    """Bytes of one page over all layers, keys and values."""
    return PAGE_TOKENS * 2 * shape.num_layers * shape.num_kv_heads * stored.row_bytes(shape.head_dim)


def record_bytes(shape: ModelShape, stored: Storage) -> int:
    """Bytes of one layer's part of a page on disk, where direct I/O moves whole multiples."""
    return aligned(page_bytes(shape, stored) // shape.num_layers)


def piece_pages(record: int) -> int:
    """Pages of `record` bytes a layer that lie together in pinned memory."""
    return max(1, _PIECE // record)


def pieces(pages: int, record: int) -> list[int]:
    """Bytes of the pieces of pinned memory that a layer of so many pages is in."""
    whole = piece_pages(record)
    return [min(whole, pages - first) * record for first in range(0, pages, whole)]
