"""Pinned host memory in a few large pieces, each a power of two, of which tensors take parts.

What CUDA's and torch's allocators are asked for they round up, torch's to the next power of two: 5 GiB of weights would
cost 8. Pieces that are powers of two cost what they are, and the sum is known before anything is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from engines.offload.memory.layout import aligned
from engines.offload.memory.pinned_pieces import packed


class PinnedMemory:
    """Room for tensors of just these `sizes` in bytes, in any order, from `allocate` (uint8, a power of two of bytes).

    `nbytes`: what is taken from the system.
    """

    def __init__(self, sizes: Iterable[int], allocate: Callable[[int], torch.Tensor]) -> None:
        self._room: dict[int, list[torch.Tensor]] = {}  # by aligned size, where tensors of it go
        pieces = packed([aligned(size) for size in sizes])
        self.nbytes = sum(size for size, _ in pieces)
        for size, parts in pieces:
            piece, start = allocate(size), 0
            for part in parts:
                self._room.setdefault(part, []).append(piece[start : start + part])
                start += part

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes rounded up to a page] of one of the sizes; each can be taken once. Raises KeyError."""
        places = self._room[aligned(nbytes)]
        place = places.pop()
        if not places:
            del self._room[aligned(nbytes)]
        return place
