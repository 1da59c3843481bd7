"""What answers are worth, beside what they cost: figures of tasks, and what a policy takes from exact answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from harness.api import Accuracy, RunRecord
from reports.paired import FEWEST, LEVEL, Paired, paired
from reports.stats import ALPHA
from reports.summary import CellSummary
from reports.tables import Cell, Column, Table, name_cell, plain_table
from reports.text import MISSING, number
from reports.vega import COLOURS, SHAPES, Panel, amount, chart, labelled, says

#: Of what figures outcomes are mean log-likelihoods, in nats.
_PERPLEXITY = "perplexity"
#: A loss of a mean log-likelihood that counts.
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
    """A line for each figure of each cell that answered a task; None where none did."""
    judged = [(row, found) for row in rows if (found := _accuracy(row))]
    if not judged:
        return None
    exact = {row.records[-1].spec.engine: found for row, found in judged if _is_exact(row.records[-1])}
    reference = next((found for row, found in judged if row.reference), None)
    lines: list[list[Cell]] = []
    for row, found in judged:
        other = exact.get(row.records[-1].spec.engine)
        mine = _lines(row, found, reference if other is found else other)
        # two engines' exact answers differ by rounding, of which the largest difference tells enough
        lines += ([*line[:-1], Cell("")] for line in mine) if other is found else mine
    return plain_table(f"What the answers are worth: {judged[0][1].protocol}", _COLUMNS, lines)


def accuracy_remarks(rows: Sequence[CellSummary]) -> list[str]:
    """What must be known of losses by quantization before they are quoted."""
    known = {m.quantized_as for row in rows if _accuracy(row) for r in row.ok_records if (m := r.model) is not None}
    words = "what further quantization takes from its answers is an indication, not what a model stored in floats loses"
    return [f"The model's own file is quantized ({name}): {words}." for name in sorted(known - {""})]


def accuracy_panel(rows: Sequence[CellSummary]) -> Panel | None:
    """The first figure of each cell's task over its speed, with the standard error; None below two such cells."""
    points = []
    for row in rows:
        found = _accuracy(row)
        name = next((n for n in found.figures if not n.endswith("_stderr")), None) if found else None
        if found and name and row.median:
            points.append((row, name, found.figures[name], found.figures.get(f"{name}_stderr", 0.0)))
    if len(points) < 2:
        return None
    title = points[0][1]
    alike = [p for p in points if p[1] == title]
    data = [
        {"cell": label, "engine": "reference" if r.reference else r.engine, "speed": r.median,
         "value": value, "low": value - 2 * error, "high": value + 2 * error,
         "says": f"{label}: {title} {number(value)} at {number(r.median or 0)} tok/s"}
        for (r, label), (_, _, value, error) in zip(labelled((p[0] for p in alike), len(alike)), alike, strict=True)
    ]  # fmt: skip
    engines = sorted({str(d["engine"]) for d in data})
    kind = {"field": "engine", "type": "nominal", "title": None}
    x, y = amount("tok/s", "speed", zero=False), amount(title, zero=False)
    spec = chart(
        300,
        data={"values": data},
        encoding={
            "x": x,
            "color": kind | {"scale": {"domain": engines, "range": list(COLOURS[: len(engines)])}},
            "shape": kind | {"scale": {"domain": engines, "range": list(SHAPES[: len(engines)])}},
            **says(),
        },
        layer=[
            {"mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.5},
             "encoding": {"y": y | {"field": "low"}, "y2": {"field": "high"}, "shape": None}},
            {"mark": {"type": "point", "filled": True, "size": 90}, "encoding": {"y": y}},
        ],
    )  # fmt: skip
    note = "Bars are two standard errors of the figure to each side. The table of answers has all figures."
    return Panel("Accuracy against speed", note, spec, None)


def lost_accuracy(before: Iterable[RunRecord], after: Iterable[RunRecord]) -> str:
    """In words, the first figure that the same examples show to be worse after than before; empty where none is.

    Beyond the paired test a perplexity must have grown by a thousandth, which the order of sums does not do.
    """
    old, new = (next((r.accuracy for r in side if r.status == "ok" and r.accuracy), None) for side in (before, after))
    if old is None or new is None:
        return ""
    for name, value in new.figures.items():
        theirs, ours = old.outcomes.get(name, ()), new.outcomes.get(name, ())
        if len(ours) != len(theirs) or len(ours) < FEWEST:
            continue
        compared = paired(theirs, ours, new.weights.get(name, ()))
        clear = compared.significant and (compared.p is None or compared.p < ALPHA)
        if clear and compared.difference < (-_LEAST_NATS if name.endswith(_PERPLEXITY) else 0):
            return f"less accurate: {name} {number(old.figures[name])} is {number(value)}"
    return ""


def _accuracy(row: CellSummary) -> Accuracy | None:
    """Of the first repeat that finished: one seed gives the same answers again."""
    return next((r.accuracy for r in row.ok_records if r.accuracy), None)


def _is_exact(record: RunRecord) -> bool:
    policy = record.spec.policy
    return policy.weight_bits == policy.kv_bits == 16 and policy.value_sparsity == 1


def _lines(row: CellSummary, found: Accuracy, exact: Accuracy | None) -> Iterator[list[Cell]]:
    for name, value in found.figures.items():
        if name.endswith("_stderr"):
            continue
        error = found.figures.get(f"{name}_stderr")
        cut = found.shortened + found.truncated
        known = [name_cell(row), Cell(name), Cell(number(value)), Cell(MISSING if error is None else number(error)),
                 Cell(str(found.examples)), Cell(str(cut) if cut else "0")]  # fmt: skip
        yield [*known, *_against(name, found, exact)]


def _against(name: str, found: Accuracy, exact: Accuracy | None) -> list[Cell]:
    """How a figure differs from that of exact answers to the same examples: of exact ones, from the reference's."""
    ours, theirs = found.outcomes.get(name, ()), exact.outcomes.get(name, ()) if exact else ()
    if exact is found or not ours or len(ours) != len(theirs):
        why = "these are what others are compared with" if exact is found else "no exact answers to the same examples"
        return [*[Cell(MISSING, why=why)] * 4, Cell("")]
    weights = found.weights.get(name, ())
    apart = [abs(a - b) * w for a, b, w in zip(ours, theirs, weights or [1.0] * len(ours), strict=True)]
    largest = Cell(f"{max(apart):.2g}")
    compared = paired(theirs, ours, weights)
    if len(ours) < FEWEST:
        few = [Cell(MISSING, why="too few examples")] * 2
        return [*few, largest, few[0], Cell(f"fewer than {FEWEST} examples: too few to judge")]
    p = Cell(MISSING, why="a test for answers that are right or wrong") if compared.p is None else _p(compared.p)
    if name.endswith(_PERPLEXITY):  # outcomes are log-likelihoods: the more, the less perplexity
        times = [math.exp(-d) for d in (compared.difference, compared.high, compared.low)]
        seen = f"{math.expm1(compared.seen):+.2%} of perplexity"
        return [Cell(f"{times[0] - 1:+.2%}"), Cell(f"{times[1] - 1:+.2%} to {times[2] - 1:+.2%}"), largest, p,
                _verdict(compared, seen, "a loss", "a gain")]  # fmt: skip
    interval = f"{compared.low:+.3g} to {compared.high:+.3g}"
    return [Cell(f"{compared.difference:+.3g}"), Cell(interval), largest, p,
            _verdict(compared, number(compared.seen), "lower", "higher")]  # fmt: skip


def _p(p: float) -> Cell:
    return Cell("< 0.001" if p < 0.001 else f"{p:.2g}")


def _verdict(compared: Paired, seen: str, less: str, more: str) -> Cell:
    """In words; that there is no difference only with what would have been seen."""
    if compared.low == compared.high == 0 and not compared.seen:
        return Cell("the same answers")
    if not compared.significant:
        return Cell(f"no significant difference; {seen} would have been seen (80 % power)")
    if compared.difference < 0:
        return Cell(f"{less}, significant at {LEVEL:.0%}", tone="bad")
    return Cell(f"{more}, significant at {LEVEL:.0%}", tone="good")
