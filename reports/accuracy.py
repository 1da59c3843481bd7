"""Accuracy of task answers: a table with paired tests against exact answers, a chart, and a check for regressions."""

import math
from collections.abc import Iterable, Sequence

from harness.api import RunRecord
from reports.judged import PERPLEXITY, Judged, accuracy_of, judged
from reports.labels import MOST_LABELS, Axis, height_for, labels, layers
from reports.stats import ALPHA, FEWEST, PAIRED_LEVEL, Paired, paired
from reports.summary import CellSummary
from reports.tables import Cell, Column, Table, name_cell, plain_table
from reports.text import MISSING, number
from reports.vega import SOFT, Panel, chart, datum, distinct, layer, quantity, tooltip

#: The smallest loss of mean log-likelihood that counts as a regression, nats.
_LEAST_NATS = 1e-3
_COLUMNS = (
    Column("Cell", numeric=False),
    Column("Figure", numeric=False),
    Column("Value"),
    Column("Std. error"),
    Column("Examples"),
    Column("Cut", "prompts"),
    Column("Against exact"),
    Column("95 % interval"),
    Column("Largest", "of an example"),
    Column("p"),
    Column("Verdict", numeric=False, wide=True),
)


def accuracy_table(rows: Sequence[CellSummary]) -> Table | None:
    """A line for each figure of each cell that ran a task; None without such a cell."""
    figures = judged(rows)
    if not figures:
        return None
    return plain_table(f"Accuracy of the answers: {figures[0].accuracy.protocol}", _COLUMNS, map(_line, figures))


def accuracy_remarks(rows: Sequence[CellSummary]) -> list[str]:
    """A caveat on quantization losses, for a model whose file is already quantized."""
    types = {m.quantized_as for row in rows if accuracy_of(row) for r in row.ok_records if (m := r.model) is not None}
    caveat = "losses from further quantization only indicate what a model stored in floats would lose"
    return [f"The model's file is already quantized ({name}): {caveat}." for name in sorted(types - {""})]


def accuracy_panel(rows: Sequence[CellSummary]) -> Panel | None:
    """The first figure of each cell's task against its throughput, with error bars; None below two such cells."""
    points = []
    for row in rows:
        accuracy = accuracy_of(row)
        name = next((n for n in accuracy.figures if not n.endswith("_stderr")), None) if accuracy else None
        if accuracy and name and row.median:
            points.append((row, name, accuracy.figures[name], accuracy.figures.get(f"{name}_stderr", 0.0)))
    if len(points) < 2:
        return None
    title = points[0][1]
    data = [
        datum(row, f"{title} {number(value)} at {number(row.median or 0)} tok/s", speed=row.median, value=value,
              engine="reference" if row.reference else row.engine, low=value - 2 * error, high=value + 2 * error)
        for row, name, value, error in points
        if name == title
    ]  # fmt: skip
    engines = sorted({str(d["engine"]) for d in data})
    x, y = Axis.of(d["speed"] for d in data), Axis.of(d[end] for d in data for end in ("low", "high"))
    named = [(d["cell"], d["speed"], d["value"]) for d in data] if len(data) <= MOST_LABELS else []
    height = height_for(len(named), 300)
    across = {"x": quantity("tok/s", "speed") | {"scale": x.scale}, **distinct("engine", engines), **tooltip()}
    up = quantity(title) | {"scale": y.scale}
    spec = chart(
        height,
        layer=[
            layer({"type": "rule", "strokeWidth": 2, "opacity": 0.5}, data=data, **across | {"shape": None},
                  y=up | {"field": "low"}, y2={"field": "high"}),
            layer({"type": "point", "filled": True, "size": 90}, data=data, **across, y=up),
            *layers(labels(named, x, y, height), SOFT),
        ],
    )  # fmt: skip
    note = "Bars extend two standard errors to each side. The accuracy table has all figures."
    return Panel("Accuracy against speed", note, spec, None)


def lost_accuracy(before: Iterable[RunRecord], after: Iterable[RunRecord]) -> str:
    """Describes the first figure that is significantly worse `after` than `before` on the same examples; else empty.

    A perplexity must also grow by 0.1 %, more than a different order of summation causes.
    """
    old, new = (next((r.accuracy for r in side if r.status == "ok" and r.accuracy), None) for side in (before, after))
    if old is None or new is None:
        return ""
    for name, value in new.figures.items():
        old_outcomes, outcomes = old.outcomes.get(name, ()), new.outcomes.get(name, ())
        if len(outcomes) != len(old_outcomes) or len(outcomes) < FEWEST:
            continue
        compared = paired(old_outcomes, outcomes, new.weights.get(name, ()))
        clear = compared.significant and (compared.p is None or compared.p < ALPHA)
        if clear and compared.difference < (-_LEAST_NATS if name.endswith(PERPLEXITY) else 0):
            return f"less accurate: {name} {number(old.figures[name])} in the base, {number(value)} in the head"
    return ""


def _line(figure: Judged) -> list[Cell]:
    accuracy, error = figure.accuracy, figure.error
    cut = accuracy.shortened + accuracy.truncated
    return [name_cell(figure.row), Cell(figure.name), Cell(number(figure.value)),
            Cell(MISSING if error is None else number(error)), Cell(str(accuracy.examples)), Cell(str(cut)),
            *_against(figure)]  # fmt: skip


def _against(figure: Judged) -> list[Cell]:
    """Cells that compare a figure with exact answers to the same examples, or exact answers with the reference's."""
    if figure.pairs is None:
        baseline = figure.against is None and (figure.exact or figure.row.reference)
        why = "the baseline of the comparison" if baseline else "no exact answers to the same examples"
        return [*[Cell(MISSING, why=why)] * 4, Cell("")]
    weights = figure.weights or [1.0] * len(figure.pairs[0])
    largest = Cell(f"{max(abs(a - b) * w for a, b, w in zip(*figure.pairs, weights, strict=True)):.2g}")
    compared, change = figure.compared, figure.change
    if compared is None or change is None:
        missing = Cell(MISSING, why="too few examples")
        few = "" if figure.exact else f"fewer than {FEWEST} examples: too few to judge"
        return [missing, missing, largest, missing, Cell(few)]
    p = Cell(MISSING, why="McNemar's test needs outcomes of 0 or 1") if compared.p is None else _p(compared.p)
    # exact answers of two engines differ by rounding, which needs no verdict beside the largest difference
    return [*map(Cell, change), largest, p, Cell("") if figure.exact else _verdict(figure, compared)]


def _p(p: float) -> Cell:
    return Cell("< 0.001" if p < 0.001 else f"{p:.2g}")


def _verdict(figure: Judged, compared: Paired) -> Cell:
    """The verdict as text; without a significant difference it states the detectable one."""
    if compared.low == compared.high == 0 and not compared.detectable:
        return Cell("the same answers")
    if not compared.significant:
        return Cell(f"no significant difference; the test detects {detectable_of(figure, compared)} with 80 % power")
    if compared.difference < 0:
        return Cell(f"{'a loss' if figure.is_perplexity else 'lower'}, significant at {PAIRED_LEVEL:.0%}", tone="bad")
    return Cell(f"{'a gain' if figure.is_perplexity else 'higher'}, significant at {PAIRED_LEVEL:.0%}", tone="good")


def detectable_of(figure: Judged, compared: Paired) -> str:
    """The difference that the test detects with a power of 80 %."""
    if figure.is_perplexity:
        return f"{math.expm1(compared.detectable):+.2%} of perplexity"
    return number(compared.detectable)
