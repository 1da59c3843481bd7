"""Which pages of another home a pass stages, where, and in what runs they are moved."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Run:
    """Pages that are neighbours at home, from `page` on, and where they are staged, from `slot` on."""

    page: int
    slot: int
    count: int


@dataclass(frozen=True)
class Staging:
    """Of one pass: where each page is staged, int64 [pages], and what is read from home and written back."""

    slots: torch.Tensor
    read: Sequence[Run]
    write: Sequence[Run]


def staging(pages: int, known: Iterable[int], touched: Iterable[int], most: int, whole: int = 1 << 62) -> Staging:
    """For a home of so many `pages`, of which `known` ones hold something and `touched` ones will.

    Runs are of at most `most` pages, and of no two times `whole`.
    """
    read, write = set(known), set(touched)
    order = sorted(read | write)
    slots = torch.zeros(pages, dtype=torch.long)
    slots[torch.tensor(order, dtype=torch.long)] = torch.arange(len(order))
    place = {page: slot for slot, page in enumerate(order)}
    return Staging(slots, *([*_runs(sorted(some), place, most, whole)] for some in (read, write)))


def _runs(pages: Sequence[int], place: Mapping[int, int], most: int, whole: int) -> Iterable[Run]:
    """Neighbours both at home and where they are staged."""
    groups = itertools.groupby(
        enumerate(pages), key=lambda pair: (pair[1] - pair[0], place[pair[1]] - pair[0], pair[1] // whole)
    )
    for _, group in groups:
        found = [page for _, page in group]
        for i in range(0, len(found), most):
            yield Run(found[i], place[found[i]], len(found[i : i + most]))
