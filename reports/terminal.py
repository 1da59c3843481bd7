"""Plain-text tables for the terminal: the summary of a run, and comparisons."""

import io
from collections.abc import Iterable

import rich.box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from harness.api import RunRecord
from harness.common.printable import clean
from reports.accuracy import accuracy_remarks, accuracy_table
from reports.answer import answer_of, headline
from reports.figures import SUMMARY
from reports.summary import by_workload, summary_rows
from reports.tables import Cell, Table, cell_table

_TITLES = {
    "Status",
    "Batch",
    "Throughput",
    "To best rival",
    "Of job's bound",
    "Of batch's bound",
    "Peak memory",
    "Limit",
}
_ACCURACY = {"Cell", "Figure", "Value", "Std. error", "Against exact", "95 % interval", "p"}
_SHOWN = tuple(f for f in SUMMARY if f.title in _TITLES)


def summary_text(records: Iterable[RunRecord], width: int = 100) -> str:
    """A headline and tables for each workload, as plain text of at most `width` columns."""
    return plain_text(summary_parts(records), width)


def summary_parts(records: Iterable[RunRecord]) -> list[str | Table]:
    """A headline and tables for each workload."""
    parts: list[str | Table] = []
    for title, rows in by_workload(summary_rows(records)).items():
        parts.append(title)
        if accuracy := accuracy_table(rows):
            parts += [answer_of(rows).claim, accuracy.only(_ACCURACY), *accuracy_remarks(rows)]
        parts += [headline(rows), cell_table("", rows, _SHOWN)]
    return parts


def plain_text(parts: Iterable[str | Table], width: int = 100) -> str:
    """Lines and tables as plain text of at most `width` columns."""
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False, emoji=False)
    for part in parts:
        console.print(Text(clean(part)) if isinstance(part, str) else _rich(part))
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def _rich(table: Table) -> RichTable:
    rich_table = RichTable(box=rich.box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    longest = max((len(row[0].text) for body in table.bodies for row in body.rows), default=0)
    for i, column in enumerate(table.columns):
        heading = "\n".join([*column.title.split(), column.unit]).rstrip()
        rich_table.add_column(
            Text(heading), justify="right" if column.numeric else "left", min_width=None if i else min(longest, 26)
        )
    for body in table.bodies:
        rich_table.add_section()
        for row in body.rows:
            rich_table.add_row(*[_text(cell) for cell in row])
    return rich_table


def _text(cell: Cell) -> Text:
    return Text(clean(" ".join([cell.text, *(f"({badge})" for badge in cell.badges)])))
