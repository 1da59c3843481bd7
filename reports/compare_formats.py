"""Renders comparisons as text, Markdown, JSON, JUnit XML, or data for github-action-benchmark."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from harness.api import to_json
from reports.junit import Case, junit
from reports.render import markdown_of
from reports.tables import Cell, Column, Table, plain_table
from reports.terminal import plain_text
from reports.text import MISSING, columns_of, inert, number
from reports.verdicts import ORDER, CellVerdict, Comparison

_TONES = {"regression": "bad", "improvement": "good", "no change": "good"}
_FIGURES = ("Cell", "Verdict", "Base", "Head", "Head / base", "95 % interval", "p", "Launches")


def compare_table(comparison: Comparison) -> Table:
    """A row a cell, worst verdict first."""
    cells = worst_first(comparison.cells)
    base, head = columns_of([c.base for c in cells]), columns_of([c.head for c in cells])
    rows = [_row(cell, old, new) for cell, old, new in zip(cells, base, head, strict=True)]
    columns = (
        Column("Cell", numeric=False),
        Column("Verdict", numeric=False),
        Column("Base", comparison.unit),
        Column("Head", comparison.unit),
        Column("Head / base", "as speed"),
        Column("95 % interval"),
        Column("p", "Holm"),
        Column("Counts above", "%"),
        Column("Launches"),
        Column("Why", numeric=False, wide=True),
    )
    return plain_table(f"{comparison.head} against {comparison.base}, {comparison.metric}", columns, rows)


def worst_first(cells: Iterable[CellVerdict]) -> list[CellVerdict]:
    """Cells in order of verdict, those that need attention first."""
    return sorted(cells, key=lambda c: ORDER.index(c.verdict))


def _row(cell: CellVerdict, base: str, head: str) -> list[Cell]:
    interval = MISSING if cell.low is None or cell.high is None else f"{cell.low:.3f} to {cell.high:.3f}"
    p = MISSING if cell.p is None else "< 0.001" if cell.p < 0.001 else f"{cell.p:.3f}"
    return [
        Cell(cell.name, why=f"{cell.engine}, {cell.workload}"),
        Cell(cell.verdict, tone=_TONES.get(cell.verdict, "muted")),
        Cell(base),
        Cell(head),
        Cell(MISSING if cell.ratio is None else f"{cell.ratio:.3f}"),
        Cell(interval),
        Cell(p),
        Cell(MISSING if cell.threshold is None else number(100 * cell.threshold)),
        Cell(f"{cell.base_launches}, {cell.head_launches}"),
        Cell("; ".join([cell.reason, *cell.remarks])),
    ]


def text(comparisons: Sequence[Comparison]) -> str:
    """Plain text for a terminal."""
    parts = []
    for comparison in comparisons:
        table = compare_table(comparison).only(_FIGURES)
        why = [f"{c.name}: {'; '.join([c.reason, *c.remarks])}" for c in worst_first(comparison.cells)]
        parts.append(plain_text([comparison.summary, table, *why, *comparison.notes]))
    return "\n\n".join(parts)


def markdown(comparisons: Sequence[Comparison]) -> str:
    """Markdown for a comment on a pull request."""
    return markdown_of("compare.md", comparisons=[(c, compare_table(c)) for c in comparisons])


def as_json(comparisons: Sequence[Comparison]) -> str:
    """JSON with all figures and verdicts."""
    return json.dumps([to_json(c) | {"verdict": c.verdict} for c in comparisons], indent=2, allow_nan=False)


def as_junit(comparisons: Sequence[Comparison]) -> str:
    """A test suite a comparison and a case a cell: a regression fails, an undecided cell is skipped."""
    return junit({f"{c.head} against {c.base}": [_case(cell, c.unit) for cell in c.cells] for c in comparisons})


def _case(cell: CellVerdict, unit: str) -> Case:
    message, figures = "; ".join([cell.reason, *cell.remarks]), _figures(cell, unit)
    if cell.verdict == "regression":
        return Case(cell.workload, cell.name, "failed", message, kind=cell.verdict, figures=figures)
    if cell.verdict in ("inconclusive", "not comparable"):
        return Case(cell.workload, cell.name, "skipped", f"{cell.verdict}: {message}")
    return Case(cell.workload, cell.name, "passed", message, figures=figures)


def github_action_benchmark(comparisons: Sequence[Comparison]) -> str:
    """The heads' figures for github-action-benchmark: customBiggerIsBetter, or customSmallerIsBetter for times.

    Its comments show names in code spans of a table, which it does not escape.
    """
    entries: list[dict[str, Any]] = [
        {
            "name": inert(cell.name if len(comparisons) == 1 else f"{comparison.head}: {cell.name}"),
            "unit": comparison.unit,
            "value": cell.head,
            "range": _range(cell),
            "extra": inert(f"{cell.verdict}: {cell.reason}"),
        }
        for comparison in comparisons
        for cell in comparison.cells
        if cell.head is not None
    ]
    return json.dumps(entries, indent=2, allow_nan=False)


FORMATS: Mapping[str, Callable[[Sequence[Comparison]], str]] = {
    "text": text,
    "md": markdown,
    "json": as_json,
    "junit": as_junit,
    "gab": github_action_benchmark,
}


def _range(cell: CellVerdict) -> str:
    if cell.low is None or cell.high is None:
        return f"{cell.head_launches} launches"
    return f"{cell.low:.3f} to {cell.high:.3f} of the base"


def _figures(cell: CellVerdict, unit: str) -> str:
    if cell.ratio is None or cell.base is None or cell.head is None:
        return "No ratio."
    medians = f"base {number(cell.base)} {unit}, head {number(cell.head)} {unit}"
    return f"{medians}; speed ratio {cell.ratio:.3f}, {_range(cell)}"
