"""How many blocks of the cache hold how many tokens: arithmetic only, without torch."""

from __future__ import annotations

from engines.offload.memory.layout import aligned
from engines.offload.memory.storage import Storage
from harness.api import ModelShape

#: Tokens a block holds: half a block is lost per sequence, and a table entry is kept for each.
BLOCK_SIZE = 8
#: Of blocks with another home the layers that are staged at once: the one that is attended to, and the next.
STAGES = 2
#: Bytes of a copy from which on larger ones are no faster: blocks in pinned memory lie together in so large pieces.
_PIECE = 16 << 20


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)


def kv_block_bytes(shape: ModelShape, stored: Storage) -> int:
    """Bytes of one block over all layers, keys and values."""
    return BLOCK_SIZE * 2 * shape.num_layers * shape.num_kv_heads * stored.row_bytes(shape.head_dim)


def record_bytes(shape: ModelShape, stored: Storage) -> int:
    """Bytes of one layer's part of a block on disk, where direct I/O moves whole multiples."""
    return aligned(kv_block_bytes(shape, stored) // shape.num_layers)


def blocks_per_piece(record: int) -> int:
    """Blocks of `record` bytes a layer that lie together in pinned memory."""
    return max(1, _PIECE // record)


def pieces(blocks: int, record: int) -> list[int]:
    """Bytes of the pieces of pinned memory that a layer of so many blocks is in."""
    whole = blocks_per_piece(record)
    return [min(whole, blocks - first) * record for first in range(0, blocks, whole)]
