"""How tensors in pinned memory share a few large pieces, each a power of two: their sizes, before anything is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engines.offload.memory.layout import aligned

#: The smallest piece and the largest: at the end of each less than a tensor is lost.
_LEAST, _MOST = 1 << 20, 1 << 33


def wasted(nbytes: int, largest: int) -> int:
    """At most so many of `nbytes` are lost at the ends of pieces, of tensors up to `largest` bytes."""
    return (nbytes // _MOST + (_MOST // max(largest, _LEAST)).bit_length()) * largest


def pinned_bytes(sizes: Iterable[int]) -> int:
    """What all pieces for tensors of such sizes take."""
    return sum(size for size, _ in packed([aligned(size) for size in sizes]))


def packed(sizes: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Pieces (bytes, what goes there) for tensors of `sizes`: the largest first, each where it still fits.

    A new piece is the largest power of two that what is left will fill, so that little is wasted but in the last.
    """
    rest = sum(sizes)
    pieces: list[tuple[int, list[int]]] = []
    left: list[int] = []
    for size, count in sorted(Counter(sizes).items(), reverse=True):
        place, missing = 0, count
        while missing:
            if place == len(left):
                most = max(_LEAST, min(_MOST, 1 << rest.bit_length() - 1) if rest else 0)
                pieces.append((max(most, 1 << (size - 1).bit_length()), []))
                left.append(pieces[-1][0])
            taken = min(missing, left[place] // max(1, size))
            pieces[place][1].extend([size] * taken)
            left[place] -= taken * size
            rest -= taken * size
            missing -= taken
            place += 1
    return pieces
