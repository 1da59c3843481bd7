"""Accuracy of task answers: a table with paired tests against exact answers, a chart, and a check for regressions."""

import math
from collections.abc import Iterable, Iterator, Sequence

from harness.api import Accuracy, OffloadPolicy, RunRecord
from reports.stats import ALPHA, FEWEST, PAIRED_LEVEL, Paired, paired
from reports.summary import CellSummary
from reports.tables import Cell, Column, Table, name_cell, plain_table
from reports.text import MISSING, number
from reports.vega import Panel, chart, datum, distinct, layer, quantity, tooltip

#: The suffix of figures whose outcomes are mean log-likelihoods, in nats.
_PERPLEXITY = "perplexity"
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
    results = [(row, accuracy) for row in rows if (accuracy := _accuracy(row))]
    if not results:
        return None
    exact_by_engine = {row.engine: accuracy for row, accuracy in results if _is_exact(row.spec.policy)}
    reference = next((accuracy for row, accuracy in results if row.reference), None)
    lines: list[list[Cell]] = []
    for row, accuracy in results:
        exact = exact_by_engine.get(row.engine)
        is_exact = exact is accuracy
        figures = _lines(row, accuracy, reference if is_exact else exact)
        # exact answers of two engines differ by rounding, which needs no verdict beside the largest difference
        lines += ([*line[:-1], Cell("")] for line in figures) if is_exact else figures
    return plain_table(f"Accuracy of the answers: {results[0][1].protocol}", _COLUMNS, lines)


def accuracy_remarks(rows: Sequence[CellSummary]) -> list[str]:
    """A caveat on quantization losses, for a model whose file is already quantized."""
    types = {m.quantized_as for row in rows if _accuracy(row) for r in row.ok_records if (m := r.model) is not None}
    caveat = "losses from further quantization only indicate what a model stored in floats would lose"
    return [f"The model's file is already quantized ({name}): {caveat}." for name in sorted(types - {""})]


def accuracy_panel(rows: Sequence[CellSummary]) -> Panel | None:
    """The first figure of each cell's task against its throughput, with error bars; None below two such cells."""
    points = []
    for row in rows:
        accuracy = _accuracy(row)
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
    x, y = quantity("tok/s", "speed", zero=False), quantity(title, zero=False)
    spec = chart(
        300,
        data={"values": data},
        encoding={"x": x, **distinct("engine", engines), **tooltip()},
        layer=[
            layer({"type": "rule", "strokeWidth": 2, "opacity": 0.5},
                  y=y | {"field": "low"}, y2={"field": "high"}, shape=None),
            layer({"type": "point", "filled": True, "size": 90}, y=y),
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
        if clear and compared.difference < (-_LEAST_NATS if name.endswith(_PERPLEXITY) else 0):
            return f"less accurate: {name} {number(old.figures[name])} in the base, {number(value)} in the head"
    return ""


def _accuracy(row: CellSummary) -> Accuracy | None:
    """The accuracy of the first ok repeat; the others have the same seed and the same answers."""
    return next((r.accuracy for r in row.ok_records if r.accuracy), None)


def _is_exact(policy: OffloadPolicy) -> bool:
    return policy.weight_bits == policy.kv_bits == 16 and policy.value_sparsity == 1


def _lines(row: CellSummary, accuracy: Accuracy, exact: Accuracy | None) -> Iterator[list[Cell]]:
    for name, value in accuracy.figures.items():
        if name.endswith("_stderr"):
            continue
        error = accuracy.figures.get(f"{name}_stderr")
        cut = accuracy.shortened + accuracy.truncated
        yield [name_cell(row), Cell(name), Cell(number(value)), Cell(MISSING if error is None else number(error)),
               Cell(str(accuracy.examples)), Cell(str(cut)), *_against(name, accuracy, exact)]  # fmt: skip


def _against(name: str, accuracy: Accuracy, exact: Accuracy | None) -> list[Cell]:
    """Cells that compare a figure with exact answers to the same examples, or exact answers with the reference's."""
    outcomes, exact_outcomes = accuracy.outcomes.get(name, ()), exact.outcomes.get(name, ()) if exact else ()
    if exact is accuracy or not outcomes or len(outcomes) != len(exact_outcomes):
        why = "the baseline of the comparison" if exact is accuracy else "no exact answers to the same examples"
        return [*[Cell(MISSING, why=why)] * 4, Cell("")]
    weights = accuracy.weights.get(name, ())
    distances = [
        abs(a - b) * w for a, b, w in zip(outcomes, exact_outcomes, weights or [1.0] * len(outcomes), strict=True)
    ]
    largest = Cell(f"{max(distances):.2g}")
    compared = paired(exact_outcomes, outcomes, weights)
    if len(outcomes) < FEWEST:
        missing = Cell(MISSING, why="too few examples")
        return [missing, missing, largest, missing, Cell(f"fewer than {FEWEST} examples: too few to judge")]
    p = Cell(MISSING, why="McNemar's test needs outcomes of 0 or 1") if compared.p is None else _p(compared.p)
    if name.endswith(_PERPLEXITY):  # outcomes are log-likelihoods: perplexity falls as they rise
        factors = [math.exp(-d) for d in (compared.difference, compared.high, compared.low)]
        detectable = f"{math.expm1(compared.detectable):+.2%} of perplexity"
        return [Cell(f"{factors[0] - 1:+.2%}"), Cell(f"{factors[1] - 1:+.2%} to {factors[2] - 1:+.2%}"), largest, p,
                _verdict(compared, detectable, "a loss", "a gain")]  # fmt: skip
    interval = f"{compared.low:+.3g} to {compared.high:+.3g}"
    return [Cell(f"{compared.difference:+.3g}"), Cell(interval), largest, p,
            _verdict(compared, number(compared.detectable), "lower", "higher")]  # fmt: skip


def _p(p: float) -> Cell:
    return Cell("< 0.001" if p < 0.001 else f"{p:.2g}")


def _verdict(compared: Paired, detectable: str, less: str, more: str) -> Cell:
    """The verdict as text; without a significant difference it states the detectable one."""
    if compared.low == compared.high == 0 and not compared.detectable:
        return Cell("the same answers")
    if not compared.significant:
        return Cell(f"no significant difference; the test detects {detectable} with 80 % power")
    if compared.difference < 0:
        return Cell(f"{less}, significant at {PAIRED_LEVEL:.0%}", tone="bad")
    return Cell(f"{more}, significant at {PAIRED_LEVEL:.0%}", tone="good")
