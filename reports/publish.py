"""A history as static pages: one with every cell's trend in a line, and one a suite with the trends' charts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from harness.common.files import inside, safe_name
from reports.history import Series
from reports.render import html_of, write
from reports.sections import spark_cell
from reports.tables import Body, Cell, Column, Table
from reports.text import MISSING, grouped, median, number, plural
from reports.trend import Change, changes, short, trend_panel

_COLUMNS = (
    Column("Cell", numeric=False),
    Column("Workload", numeric=False, wide=True),
    Column("Machine", numeric=False),
    Column("Commits"),
    Column("Latest", "tok/s"),
    Column("Over commits", numeric=False),
    Column("Last change", numeric=False),
)


def publish(series: Sequence[Series], folder: Path, library: Markup | None) -> list[Path]:
    """Writes index.html and a page a suite into `folder`, and returns their paths; a failed write keeps earlier pages.

    `library`: the code of charts (`vega.library`). Raises HarnessError for a folder that cannot be written.
    """
    suites = grouped(series, lambda s: s.suite)
    names = {suite: f"suite-{safe_name(suite)}.html" for suite in suites}
    found = {id(s): changes(s) for s in series}
    rows = {suite: [_row(s, found[id(s)]) for s in cells] for suite, cells in suites.items()}
    index = Table("Every cell, on every machine", _COLUMNS, tuple(Body(tuple(r), suite) for suite, r in rows.items()))
    pages = {
        "index.html": html_of("trends.html", title="History of speed", lead=_lead(series, found), table=index,
                              pages=list(names.items()), panels=(), library=None)
    }  # fmt: skip
    for suite, cells in suites.items():
        own = {id(s): found[id(s)] for s in cells}
        panels = [panel for s in cells if (panel := trend_panel(s))]
        table = Table("Cells", _COLUMNS, (Body(tuple(rows[suite])),))
        pages[names[suite]] = html_of("trends.html", title=suite or "No suite", lead=_lead(cells, own), table=table,
                                      pages=[("All suites", "index.html")], panels=panels, library=library)  # fmt: skip
    for name, text in pages.items():
        write(inside(folder, name), text)
    return [folder / name for name in pages]


def _lead(series: Sequence[Series], found: Mapping[int, Sequence[Change]]) -> str:
    """Which cells are at a level that is slower than the one before."""
    slower = [f"{s.cell} ({last.ratio:.3f} since {short(last.commit)})" for s in series
              if found[id(s)] and (last := found[id(s)][-1]).ratio < 1]  # fmt: skip
    few = f" and {len(slower) - 8} more" if len(slower) > 8 else ""
    state = (
        f"slower since the last change: {', '.join(slower[:8])}{few}" if slower else "none slower at its last change"
    )
    return f"{plural(len(series), 'cell')}, {state}."


def _row(series: Series, change_points: Sequence[Change]) -> tuple[Cell, ...]:
    speeds = [m for p in series.points if (m := median(p.speeds))]
    last = change_points[-1] if change_points else None
    words = f"{last.direction}: {last.ratio:.3f} since {short(last.commit)}" if last else MISSING
    return (
        Cell(series.title, why=f"engine {series.engine}"),
        Cell(series.workload),
        Cell(series.machine),
        Cell(str(len(series.points))),
        Cell(number(speeds[-1])) if speeds else Cell(MISSING, why="no launch ended ok"),
        spark_cell(speeds[-60:]) if speeds else Cell(MISSING, why="no launch ended ok"),
        Cell(words, why="" if last else "no change of level", tone="bad" if last and last.ratio < 1 else ""),
    )
