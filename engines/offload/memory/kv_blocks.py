"""Sizes of KV blocks: tokens, bytes, and how they lie on disk and in pinned memory."""

from collections.abc import Sequence

from engines.offload.memory.layout import aligned
from engines.offload.memory.storage import Storage
from harness.api import ModelShape, OffloadPolicy

#: Tokens of a block. Each sequence wastes half a block on average; each block costs a block table entry.
BLOCK_SIZE = 8
#: Stages for KV blocks that live on disk or in host memory: of the batch that attends in a layer, and of the next.
STAGES = 2
#: Bytes of a piece of pinned memory that holds consecutive blocks: larger copies are no faster.
_PIECE = 16 << 20


def blocks_for(tokens: int) -> int:
    """KV blocks for a sequence of `tokens` tokens."""
    return -(-tokens // BLOCK_SIZE)


def part_of(tiers: Sequence[range], i: int, n: int) -> list[range]:
    """The i-th of n parts of all tiers. Parts differ by one block at most, in each tier and altogether."""
    parts, one_more = list[range](), 0  # the first part that has one more in this tier
    for tier in tiers:
        least, rest = divmod(len(tier), n)
        sizes = [least + ((part - one_more) % n < rest) for part in range(n)]
        parts.append(tier[sum(sizes[:i]) : sum(sizes[: i + 1])])
        one_more = (one_more + rest) % n
    return parts


def kv_block_bytes(shape: ModelShape, stored: Storage) -> int:
    """Bytes of one KV block: keys and values of all layers."""
    return BLOCK_SIZE * 2 * shape.num_layers * shape.num_kv_heads * stored.row_bytes(shape.head_dim)


def stage_blocks(policy: OffloadPolicy, offloaded: int, longest: int, room: int | None = None) -> int:
    """Blocks of a stage for so many offloaded ones: those of one batch, of sequences of `longest` tokens at most. Which
    of a sweep's are in which batch only a pass tells.

    A batch with more blocks than there is `room` for (None: any number) goes through the stage in parts, which have as
    many as the longest sequence at least."""
    batch = offloaded
    if policy.schedule != "sweep":
        batch = min(offloaded, policy.gpu_batch_size * blocks_for(longest))
    return batch if room is None else min(batch, max(room, blocks_for(longest)))


def record_bytes(shape: ModelShape, stored: Storage) -> int:
    """Bytes of one layer's part of a block on disk, page-aligned for direct I/O."""
    return aligned(kv_block_bytes(shape, stored) // shape.num_layers)


def pieces(blocks: int, record: int) -> list[int]:
    """Bytes of each piece of pinned memory that holds one layer of `blocks` blocks, of `record` bytes a layer."""
    whole = max(1, _PIECE // record)
    return [min(whole, blocks - first) * record for first in range(0, blocks, whole)]
