"""Pinned host memory in a few large pieces, each a power of two, of which tensors take parts.

What CUDA's and torch's allocators are asked for they round up, torch's to the next power of two: 5 GiB of weights would
cost 8. Pieces that are powers of two cost what they are, and the sum is known before anything is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from engines.offload.layout import aligned

#: The smallest piece and the largest: at the end of each less than a tensor is lost.
_LEAST, _MOST = 1 << 20, 1 << 33


def wasted(nbytes: int, largest: int) -> int:
    """At most so many of `nbytes` are lost at the ends of pieces, of tensors up to `largest` bytes."""
    return (nbytes // _MOST + (_MOST // max(largest, _LEAST)).bit_length()) * largest


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


def pinned_bytes(sizes: Iterable[int]) -> int:
    """What PinnedMemory takes for such sizes."""
    return sum(size for size, _ in packed([aligned(size) for size in sizes]))


def packed(sizes: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Pieces (bytes, what goes there) for tensors of `sizes`: the largest first, each where it still fits.

    A new piece is the largest power of two that what is left will fill, so that little is wasted but in the last.
    """
    rest = sum(sizes)
    pieces: list[tuple[int, list[int]]] = []
    left: list[int] = []
    for size in sorted(sizes, reverse=True):
        place = next((i for i, room in enumerate(left) if room >= size), None)
        if place is None:
            whole = max(_LEAST, min(_MOST, 1 << rest.bit_length() - 1) if rest else 0, 1 << (size - 1).bit_length())
            pieces.append((whole, []))
            left.append(whole)
            place = len(pieces) - 1
        pieces[place][1].append(size)
        left[place] -= size
        rest -= size
    return pieces
