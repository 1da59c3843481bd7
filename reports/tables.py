"""Tables of a report as plain data, which the HTML, Markdown and terminal renderers share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from harness.common.files import safe_name
from reports.summary import CellSummary
from reports.text import MISSING, columns_of


@dataclass(frozen=True)
class Column:
    """A heading with its unit; numeric columns are right-aligned, wide columns hold sentences."""

    title: str
    unit: str = ""
    numeric: bool = True
    wide: bool = False


@dataclass(frozen=True)
class Cell:
    """The content of a table cell. `why` is its tooltip, `badges` qualify it, `tone` is good, bad or muted.

    `spark` replaces the text by a sparkline: points (x, y) in percent of width and height. On a page, `href` is the
    element that the text links to, and `anchor` the name of the row, which links to itself.
    """

    text: str
    why: str = ""
    badges: tuple[str, ...] = ()
    tone: str = ""
    spark: tuple[tuple[float, float], ...] = ()
    href: str = ""
    anchor: str = ""


@dataclass(frozen=True)
class Body:
    """A group of rows under an optional heading; the page greys out a group that is `apart`."""

    rows: tuple[tuple[Cell, ...], ...]
    heading: str = ""
    apart: bool = False


#: The most rows that a table shows; report.csv has all.
MOST_ROWS = 200


@dataclass(frozen=True)
class Table:
    """A captioned table."""

    caption: str
    columns: tuple[Column, ...]
    bodies: tuple[Body, ...]

    def first(self) -> Table:
        """The table with at most MOST_ROWS rows; the caption says of how many."""
        total = sum(len(b.rows) for b in self.bodies)
        if total <= MOST_ROWS:
            return self
        left, bodies = MOST_ROWS, []
        for body in self.bodies:
            bodies.append(replace(body, rows=body.rows[:left]))
            left -= len(bodies[-1].rows)
        caption = f"{self.caption}; the first {MOST_ROWS} of {total:,} rows, report.csv has all".lstrip("; ")
        return Table(caption, self.columns, tuple(b for b in bodies if b.rows))

    def only(self, titles: Collection[str]) -> Table:
        """The table with only the columns of these titles."""
        kept = [column.title in titles for column in self.columns]
        bodies = (replace(b, rows=tuple(tuple(itertools.compress(row, kept)) for row in b.rows)) for b in self.bodies)
        return Table(self.caption, tuple(itertools.compress(self.columns, kept)), tuple(bodies))


@dataclass(frozen=True)
class Figure:
    """A column of values by cell: how to compute a value, and why it may be missing. `scale` divides numbers."""

    title: str
    unit: str
    get: Callable[[CellSummary], float | str | Cell | None]
    why: str
    scale: float = 1.0
    numeric: bool = True


REFERENCES = "Reference: runs without the limit; shown for scale, never ranked"


def cell_table(caption: str, rows: Sequence[CellSummary], figures: Sequence[Figure], anchor: str = "") -> Table:
    """A table with one row a cell and reference cells in a group of their own at the end.

    With `anchor`, rows have permalinks: `anchor` and the beginning of the cell's fingerprint.
    """
    columns = (Column("Cell", numeric=False), *(Column(f.title, f.unit, f.numeric) for f in figures))
    names = [replace(name_cell(r), anchor=f"{anchor}-{safe_name(r.fingerprint[:12])}" if anchor else "") for r in rows]
    lines = list(zip(names, *(_format(rows, figure) for figure in figures), strict=True))
    competitors = tuple(line for line, row in zip(lines, rows, strict=True) if not row.reference)
    references = tuple(line for line, row in zip(lines, rows, strict=True) if row.reference)
    bodies = (Body(competitors), Body(references, REFERENCES, apart=True))
    return Table(caption, columns, tuple(body for body in bodies if body.rows))


def name_cell(row: CellSummary) -> Cell:
    """A cell's name, with badges that qualify its figures."""
    badges = row.qualifiers
    if row.fewer_requests:
        badges = (*badges, f"{row.num_requests} of {row.most_requests} requests")
    return Cell(row.name, why=f"engine {row.engine}, fingerprint {row.fingerprint}", badges=badges)


def status_cell(row: CellSummary) -> Cell:
    """How the cell's repeats ended, and whether the suite expects that."""
    ok = sum(s == "ok" for s in row.statuses)
    if row.expected_failure:
        return Cell(row.status, badges=("expected",), tone="muted")
    parts = [f"ok {ok} of {len(row.statuses)}"] if 0 < ok < len(row.statuses) else []
    parts += sorted({s for s in row.statuses if s != "ok"})
    if row.spec.expect != "ok":
        return Cell(", ".join(parts) or "ok", badges=(f"expected {row.spec.expect}",), tone="bad")
    return Cell(", ".join(parts) or "ok", tone="bad" if parts else "good")


def plain_table(caption: str, columns: Iterable[Column], rows: Iterable[Sequence[Cell]]) -> Table:
    """A table with one group of rows."""
    return Table(caption, tuple(columns), (Body(tuple(tuple(r) for r in rows)),))


def _format(rows: Sequence[CellSummary], figure: Figure) -> list[Cell]:
    values = [figure.get(row) for row in rows]
    texts = columns_of([v if isinstance(v, int | float) else None for v in values], figure.scale)
    cells = []
    for row, value, text in zip(rows, values, texts, strict=True):
        if value is None:
            cells.append(Cell(MISSING, why=figure.why if row.throughput else f"the cell did not finish: {row.status}"))
        elif isinstance(value, Cell):
            cells.append(value)
        else:
            cells.append(Cell(value if isinstance(value, str) else text))
    return cells
