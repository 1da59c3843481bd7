"""The verdicts of a comparison: for each cell, and overall."""

from dataclasses import dataclass
from typing import Literal, get_args

from reports.text import plural

#: In the order in which they need attention: a comparison's verdict is the first that one of its cells has.
Verdict = Literal[
    "regression",  # slower, newly failing, or less accurate
    "not comparable",  # another environment, another cell, or no figures
    "inconclusive",  # too few launches, too much noise, or launches that were disturbed or not interleaved
    "behind",  # engines only: slower than the base engine, or fails where it does not
    "improvement",  # faster, or no longer failing
    "ahead",  # engines only: faster than the base engine
    "no change",  # a slowdown of the margin or more is excluded
    "as expected",  # fails on both sides with the status that the suite expects
    "new",  # only in the head
]
ORDER: tuple[Verdict, ...] = get_args(Verdict)
#: The smallest relative effect that counts, at any p.
LEAST_EFFECT = 0.03
#: The slowdown that the verdict "no change" excludes.
MARGIN = 0.10
#: Launches of one cell that differ by this factor have a cause that must be known before anything is decided.
MULTIPLE = 2.0


@dataclass(frozen=True)
class CellVerdict:
    """The verdict on a cell. `base` and `head` are medians over the launches that count, in the metric's unit.

    `ratio` is their quotient as a speed, head over base: below 1 is slower, also for times. `p` is Holm-adjusted over
    the cells; `threshold` is the relative effect that counts.
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
    """A head compared with its base: the cells' verdicts and notes."""

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
        """The first verdict, in `ORDER`, that a cell has."""
        return next((v for v in ORDER if self.of(v)), "not comparable")

    @property
    def summary(self) -> str:
        """One line: what was compared, the overall verdict, and how many cells have which."""
        counts = ", ".join(f"{len(self.of(v))} {v}" for v in ORDER if self.of(v))
        title = f"{self.head} against {self.base}, {self.metric} in {self.unit}"
        return f"{title}: {self.verdict} ({plural(len(self.cells), 'cell')}: {counts})"
