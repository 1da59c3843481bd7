"""Which launches a run does, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.api import RunSpec


@dataclass(frozen=True)
class Step:
    """One launch to do: a cell and its repeat number."""

    cell: RunSpec
    repeat: int


def interleave(cells: Sequence[RunSpec]) -> list[Step]:
    """Round r runs every cell that has a repeat r, starting at cell r."""
    steps = []
    for r in range(max((c.repeats for c in cells), default=0)):
        start = r % len(cells)
        steps += [Step(c, r) for c in (*cells[start:], *cells[:start]) if r < c.repeats]
    return steps
