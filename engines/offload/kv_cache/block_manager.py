"""KV blocks by number: which are free, how many sequences hold each, and which prefix each block caches."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from engines.offload.memory.kv_blocks import BLOCK_SIZE


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

    The last `offloaded` block numbers are of blocks that live elsewhere. Allocation keeps their share of the blocks in
    use equal to their share of all blocks, where possible. Source: Kwon et al. 2023 (vLLM), section 4.4.
    """

    def __init__(self, num_blocks: int, offloaded: int = 0) -> None:
        self.num_blocks = num_blocks
        self._offloaded_fraction = offloaded / max(1, num_blocks)
        self._first_offloaded = num_blocks - offloaded
        self._ref_counts = [0] * num_blocks
        #: By tier: blank blocks first, then cached ones, the least recently used first.
        self._free = tuple(
            OrderedDict.fromkeys(blocks)
            for blocks in (range(self._first_offloaded), range(self._first_offloaded, num_blocks))
        )
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return sum(map(len, self._free))

    @property
    def num_used_offloaded(self) -> int:
        """Offloaded blocks that some sequence holds."""
        return self.num_blocks - self._first_offloaded - len(self._free[1])

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
                free = self._free[block >= self._first_offloaded]
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
            self._free[block >= self._first_offloaded].pop(block, None)

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

    def reset_prefix_cache(self) -> None:
        """Forgets all cached content."""
        self._hash_of.clear()
        self._block_of.clear()

    def _next_tier(self) -> int:
        """Where the next block is allocated: 0 where attention computes, 1 offloaded."""
        if not self._offloaded_fraction:
            return 0
        used = self.num_blocks - self.num_free_blocks
        tier = int(self.num_used_offloaded + 0.5 < self._offloaded_fraction * (used + 1))
        return tier if len(self._free[tier]) else 1 - tier


def extend_block_hashes(tokens: Sequence[int], hashes: list[bytes], until: int) -> None:
    """Appends to `hashes`, which covers the first blocks, the hashes of the full blocks of the first `until` tokens.

    A block's hash is of its tokens and the hash before it, so it stands for the whole prefix.
    """
    for i in range(len(hashes), until // BLOCK_SIZE):
        block = array("q", tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]).tobytes()
        hashes.append(hashlib.blake2b((hashes[-1] if hashes else b"") + block, digest_size=16).digest())
