"""Pinned host memory in a few large pieces, each a power of two, that tensors share.

Torch's pinned allocator rounds each request up to a power of two: 5 GiB of weights would cost 8. Pieces that are powers
of two cost what they are, and their sum is known before anything is allocated.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch

from engines.offload.memory.layout import aligned
from engines.offload.memory.pinned_pieces import packed


class PinnedMemory:
    """Memory for tensors of exactly these `sizes` in bytes, taken in any order; `allocate` gives uint8 pieces."""

    def __init__(self, sizes: Iterable[int], allocate: Callable[[int], torch.Tensor]) -> None:
        self._room: dict[int, list[torch.Tensor]] = defaultdict(list)  # by aligned size, free parts
        for size, parts in packed([aligned(size) for size in sizes]):
            piece, start = allocate(size), 0
            for part in parts:
                self._room[part].append(piece[start : start + part])
                start += part

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes rounded up to a page], of one of the sizes; each is given once. Raises IndexError otherwise."""
        return self._room[aligned(nbytes)].pop()
