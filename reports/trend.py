"""A cell's throughput over commits: change points, chart and table."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from string import hexdigits

import numpy as np

from reports.history import Series
from reports.optional import optional_packages
from reports.stats import interval_of
from reports.tables import Cell, Column, Table, plain_table
from reports.text import MISSING, columns_of, median, number, one_line, span
from reports.vega import BLUE, ORANGE, SOFT, Datum, Panel, chart, layer, quantity, tooltip
from reports.verdicts import LEAST_EFFECT

#: The fewest commits in which we look for change points.
FEWEST = 6
#: PELT's penalty for a change point, in units of noise variance times the logarithm of the number of commits.
_PENALTY = 4.0


@dataclass(frozen=True)
class Change:
    """The first commit of a new level, and the ratio of the new median to the old one."""

    index: int
    commit: str
    ratio: float

    @property
    def direction(self) -> str:
        """`slower` or `faster`."""
        return "slower" if self.ratio < 1 else "faster"


def changes(series: Series) -> list[Change]:
    """Change points of the commits' medians, by PELT with a squared error (Killick et al. 2012, in `ruptures`, in C).

    Estimates noise from differences of neighbours, so that a change of level does not count as noise. Ignores changes
    below 3 %.
    """
    with optional_packages("a trend"):
        import ruptures

    points = [(i, m) for i, p in enumerate(series.points) if (m := median(p.speeds))]
    if len(points) < FEWEST:
        return []
    logs = np.log([speed for _, speed in points])
    steps = np.abs(np.diff(logs))
    noise = max(float(np.median(steps)) / (0.6745 * math.sqrt(2)), 1e-4)
    penalty = _PENALTY * noise**2 * math.log(len(logs))
    ends = ruptures.KernelCPD(kernel="linear", min_size=2, jump=1).fit(logs.reshape(-1, 1)).predict(pen=penalty)
    starts = [0, *ends[:-1]]
    levels = [float(np.median(logs[a:b])) for a, b in zip(starts, ends, strict=True)]
    change_points = []
    for start, old, new in zip(starts[1:], levels, levels[1:], strict=False):
        ratio = math.exp(new - old)
        if max(ratio, 1 / ratio) - 1 > LEAST_EFFECT:
            index = points[start][0]
            change_points.append(Change(index, series.points[index].commit, ratio))
    return change_points


def trend_panel(series: Series) -> Panel | None:
    """Medians with 95 % intervals over commits, and the change points; None below two commits."""
    points = [p for p in series.points if p.speeds]
    if len(points) < 2:
        return None
    change_points = changes(series)
    by_commit = {c.commit: c for c in change_points}
    data: list[Datum] = []
    for point in points:
        middle, interval = median(point.speeds) or 0.0, interval_of(point.speeds)
        low, high = interval or (middle, middle)
        change = by_commit.get(point.commit)
        suffix = f"; {change.direction} from here: {change.ratio:.3f}" if change else ""
        words = f"{short(point.commit)}: median {number(middle)} tok/s of {len(point.speeds)} launches{suffix}"
        data.append({"commit": short(point.commit), "value": middle, "low": low, "high": high, "changed": bool(change),
                     "tooltip": words})  # fmt: skip
    x = {"field": "commit", "type": "ordinal", "sort": None, "title": "commit, in the order of measurement",
         "axis": {"labelAngle": -40, "labelOverlap": True}}  # fmt: skip
    y = quantity("generated tok/s", zero=False)
    spec = chart(
        240,
        data={"values": data},
        encoding={"x": x, **tooltip()},
        layer=[
            layer({"type": "rule", "color": ORANGE, "strokeDash": [4, 3], "strokeWidth": 2}, "datum.changed"),
            layer({"type": "rule", "color": BLUE, "opacity": 0.4, "strokeWidth": 4},
                  y=y | {"field": "low"}, y2={"field": "high"}),
            layer({"type": "line", "color": SOFT, "strokeWidth": 1}, y=y),
            layer({"type": "point", "filled": True, "size": 50, "color": BLUE}, y=y),
        ],
    )  # fmt: skip
    note = f"{one_line(series.workload)}; machine {series.machine}. Dashed lines are change points."
    return Panel(f"{series.title} over commits", note, spec, trend_table(series, change_points))


def trend_table(series: Series, change_points: Iterable[Change]) -> Table:
    """A row a commit, with its change point if it is one."""
    by_commit = {c.commit: c for c in change_points}
    speeds = columns_of([median(p.speeds) for p in series.points])
    rows = []
    for point, speed in zip(series.points, speeds, strict=True):
        interval, change = interval_of(point.speeds), by_commit.get(point.commit)
        texts = (short(point.commit), point.started_at, speed, span(*interval) if interval else MISSING,
                 str(len(point.speeds)), str(point.disturbed), str(point.failed))  # fmt: skip
        words = f"{change.direction}: {change.ratio:.3f}" if change else ""
        rows.append([*map(Cell, texts), Cell(words, tone="bad" if change and change.ratio < 1 else "good")])
    columns = [Column("Commit", numeric=False), Column("First launch", numeric=False), Column("Median", "tok/s"),
               Column("95 % interval", "tok/s"), Column("Launches"),
               Column("Disturbed"), Column("Failed"), Column("Change", numeric=False)]  # fmt: skip
    return plain_table(f"{series.title}, {series.engine}, machine {series.machine}", columns, rows)


def short(commit: str) -> str:
    """A commit's first ten digits, with + for local changes; a version or date in a commit's place stays whole."""
    digits = commit.removesuffix("+")
    return commit if set(digits) - set(hexdigits) else digits[:10] + commit[len(digits) :]
