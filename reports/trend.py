"""Where the level of a cell's speed changed over commits, and the trend as a chart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from reports.history import Series
from reports.optional import needed
from reports.stats import interval_of
from reports.tables import Cell, Column, Table, plain_table
from reports.text import MISSING, columns_of, median, number, one_line
from reports.vega import BLUE, ORANGE, SOFT, Datum, Panel, amount, chart, says
from reports.verdicts import LEAST_EFFECT

#: Fewer commits than this show no change that lasts.
FEWEST = 6
#: How much better a fit must be for each further change, in units of noise variance times the logarithm of the commits.
_PENALTY = 4.0


@dataclass(frozen=True)
class Change:
    """The first commit of a new level, and that level over the one before, as medians."""

    index: int
    commit: str
    ratio: float

    @property
    def word(self) -> str:
        """Which way it went."""
        return "slower" if self.ratio < 1 else "faster"


def changes(series: Series) -> list[Change]:
    """Change points of the medians of commits, by PELT with a squared error (Killick et al. 2012, in `ruptures`).

    Noise is taken from differences of neighbours, so that a level that changed does not count as noise. Changes of
    less than 3 % are left out.
    """
    with needed("a trend"):
        import ruptures

    points = [(i, m) for i, p in enumerate(series.points) if (m := median(p.speeds))]
    if len(points) < FEWEST:
        return []
    logs = np.log([speed for _, speed in points])
    steps = np.abs(np.diff(logs))
    noise = max(float(np.median(steps)) / (0.6745 * math.sqrt(2)), 1e-4)
    penalty = _PENALTY * noise**2 * math.log(len(logs))
    ends = ruptures.Pelt(model="l2", min_size=2, jump=1).fit(logs.reshape(-1, 1)).predict(pen=penalty)
    starts = [0, *ends[:-1]]
    levels = [float(np.median(logs[a:b])) for a, b in zip(starts, ends, strict=True)]
    found = []
    for start, old, new in zip(starts[1:], levels, levels[1:], strict=False):
        ratio = math.exp(new - old)
        if max(ratio, 1 / ratio) - 1 > LEAST_EFFECT:
            index = points[start][0]
            found.append(Change(index, series.points[index].commit, ratio))
    return found


def trend_panel(series: Series) -> Panel | None:
    """Medians with their intervals over commits, and where the level changed; None below two commits."""
    points = [p for p in series.points if p.speeds]
    if len(points) < 2:
        return None
    found = changes(series)
    marks = {c.commit: c for c in found}
    data: list[Datum] = []
    for point in points:
        middle, interval = median(point.speeds) or 0.0, interval_of(point.speeds)
        low, high = interval or (middle, middle)
        mark = marks.get(point.commit)
        change = f"; from here {mark.word}: {mark.ratio:.3f}" if mark else ""
        words = f"{short(point.commit)}: {number(middle)} tok/s of {len(point.speeds)}{change}"
        data.append({"commit": short(point.commit), "value": middle, "low": low, "high": high, "changed": bool(mark),
                     "says": words})  # fmt: skip
    x = {"field": "commit", "type": "ordinal", "sort": None, "title": "commit, in the order of measurement",
         "axis": {"labelAngle": -40, "labelOverlap": True}}  # fmt: skip
    y = amount("generated tok/s", zero=False)
    spec = chart(
        240,
        data={"values": data},
        encoding={"x": x, **says()},
        layer=[
            {"transform": [{"filter": "datum.changed"}], "mark": {"type": "rule", "color": ORANGE, "strokeDash": [4, 3],
             "strokeWidth": 2}},
            {"mark": {"type": "rule", "color": BLUE, "opacity": 0.4, "strokeWidth": 4},
             "encoding": {"y": y | {"field": "low"}, "y2": {"field": "high"}}},
            {"mark": {"type": "line", "color": SOFT, "strokeWidth": 1}, "encoding": {"y": y}},
            {"mark": {"type": "point", "filled": True, "size": 50, "color": BLUE}, "encoding": {"y": y}},
        ],
    )  # fmt: skip
    note = f"{one_line(series.workload)}; machine {series.machine}. Dashed where the level changed."
    return Panel(f"{series.cell} over commits", note, spec, trend_table(series, found))


def trend_table(series: Series, found: Iterable[Change]) -> Table:
    """A row a commit, with the changes that were found."""
    marks = {c.commit: c for c in found}
    speeds = columns_of([median(p.speeds) for p in series.points])
    rows = []
    for point, speed in zip(series.points, speeds, strict=True):
        interval = interval_of(point.speeds) if point.speeds else None
        change = marks.get(point.commit)
        words = f"{change.word}: {change.ratio:.3f}" if change else ""
        rows.append([
            Cell(short(point.commit)), Cell(point.started_at), Cell(speed),
            Cell(" to ".join(columns_of(interval)) if interval else MISSING), Cell(str(len(point.speeds))),
            Cell(str(point.failed)), Cell(words, tone="bad" if change and change.ratio < 1 else "good"),
        ])  # fmt: skip
    columns = [Column("Commit", numeric=False), Column("First launch", numeric=False), Column("Median", "tok/s"),
               Column("95 % interval", "tok/s"), Column("Launches"), Column("Failed"),
               Column("Change", numeric=False)]  # fmt: skip
    return plain_table(f"{series.cell}, {series.engine}, machine {series.machine}", columns, rows)


def short(commit: str) -> str:
    """A commit as people write it; a + stands for local changes. A day that stands for a commit is left whole."""
    if " " in commit:
        return commit
    return commit[:10] + ("+" if commit.endswith("+") else "")


def trend_panels(all_series: Sequence[Series]) -> list[Panel]:
    """A panel for each series that has one."""
    return [panel for series in all_series if (panel := trend_panel(series))]
