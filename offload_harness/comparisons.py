"""Comparisons of runs with a base, or of engines with one of them, and their verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.api import HarnessError
from offload_harness.frames import frame_of, html_of
from offload_harness.runs import Run, path_of

if TYPE_CHECKING:
    import pandas as pd

    from reports.verdicts import Comparison, Verdict


@dataclass(frozen=True)
class Comparisons:
    """One comparison of two runs, or one of engines for each workload. A notebook shows their tables."""

    comparisons: Sequence[Comparison]

    @property
    def verdict(self) -> Verdict:
        """The verdict that needs attention first; see `harness compare`."""
        from reports.verdicts import ORDER

        return min((c.verdict for c in self.comparisons), key=ORDER.index)

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each cell: its `verdict` and `reason`, the medians `base` and `head` of the `metric` in its `unit`,
        their `ratio` as a speed (below 1 the head is slower) with its 95 % interval from `low` to `high`, `p` after
        Holm's correction, the `threshold` of a relevant effect, and how many launches counted."""
        rows = [
            {"of": c.head, "against": c.base, "metric": c.metric, "unit": c.unit}
            | {name: "; ".join(value) if name == "remarks" else value for name, value in asdict(cell).items()}
            for c in self.comparisons
            for cell in c.cells
        ]
        return frame_of(rows)

    def __str__(self) -> str:
        from reports.compare_formats import FORMATS

        return FORMATS["text"](self.comparisons)

    def _repr_html_(self) -> str:
        from reports.compare_formats import compare_table

        return html_of(part for c in self.comparisons for part in (c.summary, compare_table(c)))


def compare(
    base: str | Path | Run, head: str | Path | Run | None = None, *, against: str | None = None,
    metric: str | None = None, again: Sequence[str | Path | Run] = (), allow: Sequence[str] = (),
    alpha: float | None = None, margin: float | None = None,
) -> Comparisons:  # fmt: skip
    """Says which cells of the run `head` became slower than in `base`; both are runs or their folders.

    Or, with `against` and without `head`, how the cells of one run compare with one cell or with an engine's fastest.
    `again`: other runs of the base's code, which say how far runs differ. The other settings and the method are those
    of `harness compare`.

    Raises HarnessError for folders without records, unknown metrics and settings that are out of range.
    """
    from reports.compare import compare_engines, compare_runs
    from reports.records import read_runs
    from reports.speed import Rules

    for name, fraction in (("alpha", alpha), ("margin", margin)):
        if fraction is not None and not 0 < fraction < 1:
            raise HarnessError(f"{name} is {fraction}; it must lie between 0 and 1")
    given: dict[str, Any] = {"metric": metric, "alpha": alpha, "margin": margin}
    given = {name: value for name, value in given.items() if value is not None}
    rules = Rules(allow=tuple(allow), again=[read_runs([_folder(run)]) for run in again], **given)
    if (head is None) == (against is None):
        raise HarnessError("compare needs either a second run, or `against` a cell or engine of one run")
    if against is None:
        assert head is not None
        return Comparisons(compare_runs(_folder(base), [_folder(head)], rules))
    if again or allow:
        raise HarnessError("`again` and `allow` go with two runs, not with `against`")
    return Comparisons(compare_engines([_folder(base)], against, rules))


def _folder(run: str | Path | Run) -> Path:
    return run.out if isinstance(run, Run) else path_of(run)
