"""A comparison as text, Markdown, JSON, JUnit XML, or data for github-action-benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from harness.api import to_json
from reports.junit import Case
from reports.junit import junit as as_junit
from reports.render import markdown_of
from reports.tables import Cell, Column, Table, plain_table
from reports.terminal import plain_text
from reports.text import MISSING, columns_of, number
from reports.verdicts import CellVerdict, Comparison

_ORDER = ("regression", "not comparable", "inconclusive", "improvement", "behind", "no change", "ahead", "new",
          "as expected")  # fmt: skip
_TONES = {"regression": "bad", "improvement": "good", "no change": "good"}
_FIGURES = ("Cell", "Verdict", "Base", "Head", "Head / base", "95 % interval", "p", "Launches")


def compare_table(found: Comparison) -> Table:
    """A row a cell, the worst first."""
    cells = worst_first(found.cells)
    base, head = columns_of([c.base for c in cells]), columns_of([c.head for c in cells])
    rows = [_row(cell, old, new) for cell, old, new in zip(cells, base, head, strict=True)]
    columns = (
        Column("Cell", numeric=False),
        Column("Verdict", numeric=False),
        Column("Base", found.unit),
        Column("Head", found.unit),
        Column("Head / base", "as speed"),
        Column("95 % interval"),
        Column("p", "Holm"),
        Column("Counts above", "%"),
        Column("Launches"),
        Column("Why", numeric=False, wide=True),
    )
    return plain_table(f"{found.head} against {found.base}, {found.metric}", columns, rows)


def worst_first(cells: Iterable[CellVerdict]) -> list[CellVerdict]:
    """Cells by what needs attention."""
    return sorted(cells, key=lambda c: _ORDER.index(c.verdict))


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


def text(found: Sequence[Comparison]) -> str:
    """For a terminal, without colours."""
    parts = []
    for one in found:
        table = compare_table(one).only(_FIGURES)
        why = [f"{c.name}: {'; '.join([c.reason, *c.remarks])}" for c in worst_first(one.cells)]
        parts.append(plain_text(one.summary, table, [*why, *one.notes]))
    return "\n\n".join(parts)


def markdown(found: Sequence[Comparison]) -> str:
    """For a comment on a pull request."""
    shown = [(one, compare_table(one)) for one in found]
    return markdown_of("compare.md", comparisons=shown)


def as_json(found: Sequence[Comparison]) -> str:
    """Every figure, and the verdicts."""
    return json.dumps([to_json(one) | {"verdict": one.verdict} for one in found], indent=2, allow_nan=False)


def junit(found: Sequence[Comparison]) -> str:
    """A suite a comparison and a case a cell: regressions are failures, what could not be decided is skipped."""
    return as_junit({f"{one.head} against {one.base}": [_case(one, cell) for cell in one.cells] for one in found})


def _case(one: Comparison, cell: CellVerdict) -> Case:
    words, figures = "; ".join([cell.reason, *cell.remarks]), _figures(cell, one.unit)
    if cell.verdict == "regression":
        return Case(cell.workload, cell.name, "failed", words, kind=cell.verdict, figures=figures)
    if cell.verdict in ("inconclusive", "not comparable"):
        return Case(cell.workload, cell.name, "skipped", f"{cell.verdict}: {words}")
    return Case(cell.workload, cell.name, "passed", words, figures=figures)


def github_action_benchmark(found: Sequence[Comparison]) -> str:
    """The heads' figures in the format of github-action-benchmark: customBiggerIsBetter, or for times the other."""
    entries: list[dict[str, Any]] = [
        {
            "name": cell.name if len(found) == 1 else f"{one.head}: {cell.name}",
            "unit": one.unit,
            "value": cell.head,
            "range": _range(cell),
            "extra": f"{cell.verdict}: {cell.reason}",
        }
        for one in found
        for cell in one.cells
        if cell.head is not None
    ]
    return json.dumps(entries, indent=2, allow_nan=False)


FORMATS: Mapping[str, Callable[[Sequence[Comparison]], str]] = {
    "text": text,
    "md": markdown,
    "json": as_json,
    "junit": junit,
    "gab": github_action_benchmark,
}


def _range(cell: CellVerdict) -> str:
    if cell.low is None or cell.high is None:
        return f"{cell.head_launches} launches"
    return f"{cell.low:.3f} to {cell.high:.3f} of the base"


def _figures(cell: CellVerdict, unit: str) -> str:
    if cell.ratio is None or cell.base is None or cell.head is None:
        return "No ratio."
    return f"{number(cell.base)} is {number(cell.head)} {unit}; as speed {cell.ratio:.3f}, {_range(cell)}"
