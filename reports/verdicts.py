"""What a comparison says: a verdict for each cell, and for the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from reports.text import plural

Verdict = Literal[
    "regression",  # slower, newly failing, or less accurate
    "improvement",  # faster, or no longer failing
    "no change",  # a slowdown of the margin or more is excluded
    "inconclusive",  # the launches cannot tell
    "not comparable",  # another environment, another cell, or no figures
    "as expected",  # fails on both sides in the way that its suite says
    "new",  # only in the head
    "behind",  # of engines: slower than the one they are held against, or failing where it does not
    "ahead",  # of engines: faster
]
#: Effects below this are never a verdict, whatever their p.
LEAST_EFFECT = 0.03
#: "No change" promises that a slowdown of this size would not have stayed hidden.
MARGIN = 0.10


@dataclass(frozen=True)
class CellVerdict:
    """One cell on two sides. Figures are medians over the launches that ended ok, in the metric's own unit.

    `ratio` is head over base as speed: below 1 is slower, whichever way the metric points. `p` is adjusted for the
    suite's cells; `threshold` is the effect that counts, as a part of 1.
    """

    name: str
    engine: str
    workload: str
    verdict: Verdict
    reason: str
    base: float | None = None
    head: float | None = None
    base_launches: int = 0
    head_launches: int = 0
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    noise_floor: float | None = None
    threshold: float | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A head beside its base: what may be said of each cell, and of the whole."""

    base: str
    head: str
    metric: str
    unit: str
    alpha: float
    cells: tuple[CellVerdict, ...]
    notes: tuple[str, ...] = ()

    def of(self, *verdicts: Verdict) -> tuple[CellVerdict, ...]:
        """The cells with one of these verdicts."""
        return tuple(c for c in self.cells if c.verdict in verdicts)

    @property
    def verdict(self) -> Verdict:
        """The worst that was found: a regression, then what could not be decided, then the best of the rest."""
        order: tuple[Verdict, ...] = ("regression", "not comparable", "inconclusive", "behind", "improvement", "ahead",
                                      "no change")  # fmt: skip
        return next((v for v in order if self.of(v)), "as expected" if self.of("as expected") else "not comparable")

    @property
    def summary(self) -> str:
        """One sentence."""
        counts = ", ".join(f"{len(self.of(v))} {v}" for v in get_args(Verdict) if self.of(v))
        what = f"{self.head} against {self.base}, {self.metric} in {self.unit}"
        return f"{what}: {self.verdict} ({plural(len(self.cells), 'cell')}: {counts})"
