"""Which blocks of another home a pass stages, where, and in what runs they are moved."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Run:
    """Blocks that are neighbours at home, from `block` on, and where they are staged, from `slot` on."""

    block: int
    slot: int
    count: int


@dataclass(frozen=True)
class Staging:
    """Of one pass: where each block is staged, int64 [blocks], and what is read from home and written back."""

    slots: torch.Tensor
    read: Sequence[Run]
    write: Sequence[Run]


def staging(blocks: int, filled: Iterable[int], written: Iterable[int], most: int, whole: int = 1 << 62) -> Staging:
    """For a home of so many `blocks`, of which `filled` ones hold something and `written` ones will.

    Runs are of at most `most` blocks, and of no two times `whole`.
    """
    read, write = set(filled), set(written)
    order = sorted(read | write)
    slots = torch.zeros(blocks, dtype=torch.long)
    slots[torch.tensor(order, dtype=torch.long)] = torch.arange(len(order))
    place = {block: slot for slot, block in enumerate(order)}
    return Staging(slots, *([*_runs(sorted(some), place, most, whole)] for some in (read, write)))


def _runs(blocks: Sequence[int], place: Mapping[int, int], most: int, whole: int) -> Iterable[Run]:
    """Neighbours both at home and where they are staged."""
    groups = itertools.groupby(
        enumerate(blocks), key=lambda pair: (pair[1] - pair[0], place[pair[1]] - pair[0], pair[1] // whole)
    )
    for _, group in groups:
        found = [block for _, block in group]
        for i in range(0, len(found), most):
            yield Run(found[i], place[found[i]], len(found[i : i + most]))
