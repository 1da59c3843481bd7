"""KV blocks by number: which are free, how many sequences hold each, and which prefix each block caches."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Protocol

from engines.offload.memory.kv_blocks import part_of


class Chunk(Protocol):
    """What the cache needs of a scheduled chunk: `count` new tokens of a sequence that has `cached` before them."""

    @property
    def count(self) -> int: ...

    @property
    def cached(self) -> int: ...

    @property
    def block_table(self) -> Sequence[int]: ...


class BlockManager:
    """Allocates, shares and frees blocks. A cached block keeps its content while it is free, for sequences with the
    same prefix, until it is evicted: the least recently used goes first.

    Block numbers are ordered by tier: first the blocks where attention computes, then `offloaded` ones, of which the
    `last` are on the lowest tier. Allocation keeps the offloaded part of the blocks in use equal to their part of all
    blocks where it can, and takes the lowest tier last. Source: Kwon et al. 2023 (vLLM), section 4.4.

    `part`, (i, n), manages only the i-th of n parts of them that differ by one block at most. `sizes`: blocks where
    attention computes, offloaded, and of the last ones.
    """

    def __init__(self, num_blocks: int, offloaded: int = 0, last: int = 0, part: tuple[int, int] = (0, 1)) -> None:
        self._offloaded_fraction = offloaded / max(1, num_blocks)
        self._first = (0, num_blocks - offloaded, num_blocks - last, num_blocks)  # of each tier
        tiers = part_of([range(a, b) for a, b in pairwise(self._first)], *part)
        near, lower, farthest = map(len, tiers)
        self.sizes = near, lower, farthest  # by tier
        self.num_blocks = sum(self.sizes)
        self._ref_counts = dict.fromkeys(chain(*tiers), 0)
        #: By tier: blank blocks first, then cached ones, the least recently used first.
        self._free = tuple(map(OrderedDict.fromkeys, tiers))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return sum(map(len, self._free))

    @property
    def num_used(self) -> tuple[int, int, int]:
        """Blocks that some sequence holds: where attention computes, offloaded, and of the last ones."""
        near, lower, last = (size - len(free) for size, free in zip(self.sizes, self._free, strict=True))
        return near, lower, last

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks: blank ones, then the least recently used cached ones, whose content is forgotten.

        Raises ValueError where fewer are free; the scheduler preempts before it asks for more.
        """
        if count > self.num_free_blocks:
            raise ValueError(f"{count} blocks needed, {self.num_free_blocks} are free")
        allocated = []
        for _ in range(count):
            block, _ = self._free[self._next_tier()].popitem(last=False)
            if block in self._hash_of:
                del self._block_of[self._hash_of.pop(block)]
            self._ref_counts[block] = 1
            allocated.append(block)
        return allocated

    def free(self, blocks: Sequence[int]) -> None:
        """Ends one sequence's hold on each block."""
        for block in reversed(blocks):  # of a prefix its end is evicted first
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                free = self._free[self._tier(block)]
                free[block] = None
                if block not in self._hash_of:
                    free.move_to_end(block, last=False)

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that cache a prefix with these block hashes, up to the first that is not cached."""
        blocks = []
        for block_hash in hashes:
            if (block := self._block_of.get(block_hash)) is None:
                break
            blocks.append(block)
        return blocks

    def ref(self, blocks: Sequence[int]) -> None:
        """One more sequence holds each block, which `match_prefix` gave."""
        for block in blocks:
            self._ref_counts[block] += 1
            self._free[self._tier(block)].pop(block, None)

    def cache_block(self, block: int, block_hash: bytes) -> None:
        """Makes a full block's content known by its hash; of several blocks with one content the first is known."""
        if block not in self._hash_of and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def keep(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """A sequence gives up these blocks of known content; a cache with a store keeps that for later."""

    def restore(self, hashes: Sequence[bytes]) -> list[int]:
        """Newly allocated blocks with stored content, of the first of these block hashes; without a store none."""
        return []

    def may_restore(self, hashes: Sequence[bytes]) -> bool:
        """Whether `restore` may have to read a store."""
        return False

    def reset_prefix_cache(self) -> None:
        """Forgets all cached content."""
        self._hash_of.clear()
        self._block_of.clear()

    def _tier(self, block: int) -> int:
        return bisect_right(self._first, block, 1, 3) - 1

    def _next_tier(self) -> int:
        """Where the next block is allocated: 0 where attention computes, 1 and 2 offloaded."""
        if not self._offloaded_fraction:
            return 0
        near, *lower = self.num_used
        offloaded = sum(lower) + 0.5 < self._offloaded_fraction * (near + sum(lower) + 1)
        order = (1, 2, 0) if offloaded else (0, 1, 2)
        return next(tier for tier in order if self._free[tier])
