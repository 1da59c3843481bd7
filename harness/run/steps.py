"""Which launches a run does, and in which order."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from harness.api import RunRecord, RunSpec

#: A repeat cannot end otherwise, so the cell's other repeats are left out, now and on resume.
REFUSALS = ("infeasible", "unsupported", "timeout")


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


def possible(cells: Sequence[RunSpec], done: Collection[RunRecord]) -> list[Step]:
    """The launches of `cells` in order, less those of cells that one of the records in `done` refuses."""
    refused = {record.fingerprint for record in done if record.status in REFUSALS}
    return [step for step in interleave(cells) if step.cell.fingerprint() not in refused]
