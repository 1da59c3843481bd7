"""Packs pinned tensors into a few large pieces of power-of-two size, as torch's pinned allocator rounds up."""

from collections import Counter
from collections.abc import Iterable, Sequence

from engines.offload.memory.layout import aligned

#: Bytes of the smallest and the largest piece. Less than one tensor is wasted at the end of each.
_LEAST, _MOST = 1 << 20, 1 << 33


def wasted(nbytes: int, largest: int) -> int:
    """An upper bound of the bytes wasted at the ends of pieces for `nbytes` of tensors up to `largest` bytes each."""
    return (nbytes // _MOST + (_MOST // max(largest, _LEAST)).bit_length()) * largest


def pinned_bytes(sizes: Iterable[int]) -> int:
    """Bytes of all pieces that hold tensors of these sizes."""
    counts = Counter(sizes)  # few sizes, of many tensors
    rounded = [n for size, count in counts.items() for n in [aligned(size)] * count]
    return sum(piece for piece, _ in packed(rounded))


def packed(sizes: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Pieces as (bytes, sizes of the tensors inside), by first fit of the largest tensors first.

    A new piece is the largest power of two that the remaining tensors fill, so only the last pieces waste memory.
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
