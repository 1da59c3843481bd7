"""The cache's blocks by number: which are free, how many hold each, and which begin of a text is on it."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engines.offload.memory.kv_blocks import BLOCK_SIZE


class BlockManager:
    """Blocks that are taken, shared and given back. A block that was published keeps its content while it is free, to
    be found by those whose text begins alike, until it is needed; of such blocks the longest unused goes first.

    The last `on_disk` of all blocks are there; of those that are taken as large a part, to a block, where it can be.
    Source: Kwon et al. 2023 (vLLM), section 4.4, at the grain of a block.
    """

    def __init__(self, blocks: int, on_disk: int = 0) -> None:
        self.num_blocks = blocks
        self._share = on_disk / max(1, blocks)
        self._in_memory = blocks - on_disk
        self._holders = [0] * blocks
        self._free = (_Free(range(self._in_memory)), _Free(range(self._in_memory, blocks)))
        self._content: dict[int, bytes] = {}  # by block, what it was published as
        self._block_bytes: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """KVBlocks nobody holds."""
        return sum(map(len, self._free))

    @property
    def num_used_on_disk(self) -> int:
        """Blocks on disk that somebody holds."""
        return self.num_blocks - self._in_memory - len(self._free[1])

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks. Raises ValueError where there are fewer: the caller makes room first."""
        if count > self.num_free_blocks:
            raise ValueError(f"{count} blocks wanted, {self.num_free_blocks} are free")
        taken = []
        for _ in range(count):
            block = self._free[self._next_home()].take()
            if block in self._content:
                del self._block_bytes[self._content.pop(block)]
            self._holders[block] = 1
            taken.append(block)
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Of each block one holder less."""
        for block in reversed(blocks):  # of a text its end is lost first
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block >= self._in_memory].add(block, block in self._content)

    def match_prefix(self, names: Iterable[bytes]) -> list[int]:
        """The blocks that hold what the first of `names` stand for, up to the first that is nowhere."""
        found = []
        for name in names:
            if (block := self._block_bytes.get(name)) is None:
                break
            found.append(block)
        return found

    def ref(self, blocks: Sequence[int]) -> None:
        """Of each block, found by `known`, one holder more."""
        for block in blocks:
            self._holders[block] += 1
            self._free[block >= self._in_memory].kept.pop(block, None)

    def cache_block(self, block: int, name: bytes) -> None:
        """Says what is on a block that is held; of several blocks with the same on them the first is known."""
        if block not in self._content and name not in self._block_bytes:
            self._content[block] = name
            self._block_bytes[name] = block

    def reset_prefix_cache(self) -> None:
        """Nothing that was published is true any more."""
        for free in self._free:
            free.blank += free.kept
            free.kept.clear()
        self._content.clear()
        self._block_bytes.clear()

    def _next_home(self) -> int:
        """Where the next block is taken: 0 in memory, 1 on disk."""
        if not self._share:
            return 0
        taken = self.num_blocks - self.num_free_blocks
        wanted = int(self.num_used_on_disk + 0.5 < self._share * (taken + 1))
        return wanted if len(self._free[wanted]) else 1 - wanted


class _Free:
    """Free blocks: `blank` ones, and `kept` ones with a content, longest unused first."""

    def __init__(self, blocks: Iterable[int]) -> None:
        self.blank = list(blocks)[::-1]
        self.kept: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.blank) + len(self.kept)

    def take(self) -> int:
        """A blank block, or else the one that was kept longest."""
        return self.blank.pop() if self.blank else self.kept.popitem(last=False)[0]

    def add(self, block: int, keep: bool) -> None:
        """A block that nobody holds any more."""
        if keep:
            self.kept[block] = None
        else:
            self.blank.append(block)


def extend_block_hashes(tokens: Sequence[int], names: list[bytes], until: int) -> None:
    """Appends to `names`, which has those of the first blocks, the names of the full blocks of the first `until`
    tokens.

    A name stands for a block's tokens and all before them.
    """
    for i in range(len(names), until // BLOCK_SIZE):
        part = array("q", tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]).tobytes()
        names.append(hashlib.blake2b((names[-1] if names else b"") + part, digest_size=16).digest())
