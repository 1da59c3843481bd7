"""Tables of a report as plain data: what HTML and Markdown show is decided once, here and in figures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from reports.summary import CellSummary
from reports.text import MISSING, columns_of


@dataclass(frozen=True)
class Column:
    """A heading with its unit; numeric columns are set flush right, wide ones hold sentences."""

    title: str
    unit: str = ""
    numeric: bool = True
    wide: bool = False


@dataclass(frozen=True)
class Cell:
    """What one table cell shows. `why` explains it on demand, `badges` qualify it, `tone` is good, bad or muted.

    `spark` draws samples over the run instead of text: points in percent of width and height.
    """

    text: str
    why: str = ""
    badges: tuple[str, ...] = ()
    tone: str = ""
    spark: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Body:
    """Rows that belong together under an optional heading; `apart` ones stand back from the rest."""

    rows: tuple[tuple[Cell, ...], ...]
    heading: str = ""
    apart: bool = False


#: Rows of a table that people may still read; report.csv has all.
MOST_ROWS = 200


@dataclass(frozen=True)
class Table:
    """A captioned table."""

    caption: str
    columns: tuple[Column, ...]
    bodies: tuple[Body, ...]

    @property
    def in_words(self) -> Table:
        """The table without the columns that draw samples."""
        first = next((row for body in self.bodies for row in body.rows), ())
        return self._of({i for i, _ in enumerate(self.columns)} - {i for i, cell in enumerate(first) if cell.spark})

    def first(self, count: int = MOST_ROWS) -> Table:
        """The table with so many rows at most, and what it leaves out in its caption."""
        total = sum(len(b.rows) for b in self.bodies)
        if total <= count:
            return self
        left, bodies = count, []
        for body in self.bodies:
            bodies.append(replace(body, rows=body.rows[:left]))
            left -= len(bodies[-1].rows)
        words = f"{self.caption}; the first {count} of {total:,} rows, report.csv has all".lstrip("; ")
        return Table(words, self.columns, tuple(b for b in bodies if b.rows))

    def only(self, titles: Collection[str]) -> Table:
        """The table with the columns of these titles alone."""
        return self._of({i for i, column in enumerate(self.columns) if column.title in titles})

    def _of(self, kept: Collection[int]) -> Table:
        columns = tuple(c for i, c in enumerate(self.columns) if i in kept)
        bodies = tuple(
            replace(b, rows=tuple(tuple(c for i, c in enumerate(row) if i in kept) for row in b.rows))
            for b in self.bodies
        )
        return Table(self.caption, columns, bodies)


@dataclass(frozen=True)
class Figure:
    """A column of numbers or words about cells: how to get it, and why it may be missing."""

    title: str
    unit: str
    get: Callable[[CellSummary], float | str | None]
    why: str
    scale: float = 1.0
    numeric: bool = True


REFERENCES = "Reference: run without the limit, shown for scale and never ranked"


def cell_table(caption: str, rows: Sequence[CellSummary], figures: Sequence[Figure], status: bool = False) -> Table:
    """A table with one row a cell; reference cells stand apart, below the others."""
    columns = [Column("Cell", numeric=False)] + ([Column("Status", numeric=False)] if status else [])
    columns += [Column(f.title, f.unit, f.numeric) for f in figures]
    by_figure = [_format(rows, figure) for figure in figures]
    lines = [
        (name_cell(row), *([status_cell(row)] if status else []), *(cells[i] for cells in by_figure))
        for i, row in enumerate(rows)
    ]
    own = tuple(line for line, row in zip(lines, rows, strict=True) if not row.reference)
    references = tuple(line for line, row in zip(lines, rows, strict=True) if row.reference)
    bodies = [Body(own)] * bool(own) + [Body(references, REFERENCES, apart=True)] * bool(references)
    return Table(caption, tuple(columns), tuple(bodies))


def name_cell(row: CellSummary) -> Cell:
    """A cell's name with what qualifies its figures."""
    badges = ["reference"] * row.reference + ["simulated"] * row.simulated + ["projected"] * row.projected
    if row.fewer_requests:
        badges.append(f"{row.num_requests} of {row.most_requests} requests")
    return Cell(row.name, why=f"engine {row.engine}, fingerprint {row.fingerprint}", badges=tuple(badges))


def status_cell(row: CellSummary) -> Cell:
    """How the cell's repeats ended, and whether that was expected."""
    done = sum(s == "ok" for s in row.statuses)
    if row.expected_failure:
        return Cell(row.status, badges=("expected",), tone="muted")
    parts = [f"ok {done} of {len(row.statuses)}"] if 0 < done < len(row.statuses) else []
    parts += sorted({s for s in row.statuses if s != "ok"})
    if row.expect != "ok":
        return Cell(", ".join(parts) or "ok", badges=(f"expected {row.expect}",), tone="bad")
    return Cell(", ".join(parts) or "ok", tone="bad" if parts else "good")


def plain_table(caption: str, columns: Iterable[Column], rows: Iterable[Sequence[Cell]]) -> Table:
    """A table of one body."""
    return Table(caption, tuple(columns), (Body(tuple(tuple(r) for r in rows)),))


def _format(rows: Sequence[CellSummary], figure: Figure) -> list[Cell]:
    values = [figure.get(row) for row in rows]
    texts = columns_of([None if isinstance(v, str) else v for v in values], figure.scale)
    cells = []
    for row, value, text in zip(rows, values, texts, strict=True):
        if isinstance(value, str):
            cells.append(Cell(value))
        elif value is None:
            cells.append(Cell(MISSING, why=figure.why if row.throughput else f"the cell did not finish: {row.status}"))
        else:
            cells.append(Cell(text))
    return cells
