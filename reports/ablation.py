"""What single settings are worth: cells of one engine that differ from one of them in one thing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.api import RunSpec
from reports.cells import settings_of
from reports.stats import Ratio, ratio_of
from reports.summary import CellSummary, ranked
from reports.tables import Cell, Column, name_cell, plain_table
from reports.text import MISSING, TIMES_SIGN, number, one_line
from reports.vega import GREEN, GREY, MOST_CELLS, ORANGE, SOFT, Datum, Panel, amount, labelled, row_chart, says

#: Settings that only make sense together count as one.
_TOGETHER: Mapping[str, str] = {
    "policy.gpu_batch_size": "batch and schedule",
    "policy.num_gpu_batches": "batch and schedule",
    "policy.schedule": "batch and schedule",
    "policy.weights": "placement",
    "policy.cache": "placement",
    "policy.activations": "placement",
    "policy.nano_batches": "nano-batches",
    "policy.nano_overlap": "nano-batches",
    "policy.weight_bits": "bits",
    "policy.kv_bits": "bits",
}
#: What is no technique.
_LEFT_OUT = (*RunSpec.LABELS, "warmup", "seed", "launcher", "image", "workload.num_requests")


@dataclass(frozen=True)
class Step:
    """A cell and how it differs from the one that all are measured against."""

    row: CellSummary
    change: str
    ratio: Ratio


def steps(rows: Sequence[CellSummary]) -> tuple[CellSummary, list[Step]] | None:
    """The cell that most others differ from in one setting, and those others by what the change costs; None below two.

    All of one engine and workload. Of cells that are alike in this the fastest is taken.
    """
    rows = ranked(rows)[:MOST_CELLS]
    settings = {r.fingerprint: _settings(r) for r in rows}
    best: tuple[CellSummary, list[tuple[CellSummary, str]]] | None = None
    for base in rows:
        limits = base.records[-1].spec.limits
        others = [r for r in rows if r is not base and r.engine == base.engine and r.records[-1].spec.limits == limits]
        found = [(r, c) for r in others if (c := _change(settings[base.fingerprint], settings[r.fingerprint]))]
        if len(found) >= 2 and (best is None or len(found) > len(best[1])):
            best = (base, found)
    if best is None:
        return None
    base, found = best
    changes = [Step(r, change, ratio_of(base.throughput, r.throughput)) for r, change in found]
    return base, sorted(changes, key=lambda s: -s.ratio.ratio)


def ablation_panel(rows: Sequence[CellSummary]) -> Panel | None:
    """A waterfall: from the whole, what each single change takes or adds."""
    found = steps(rows)
    if found is None:
        return None
    base, changes = found
    (_, top), *names = labelled([base, *(s.row for s in changes)])
    whole = base.median or 0.0
    data: list[Datum] = [{"cell": top, "from": 0.0, "to": whole, "kind": "all of it",
                          "says": f"{top}: {number(whole)} tok/s"}]  # fmt: skip
    for step, (row, name) in zip(changes, names, strict=True):
        value = row.median or 0.0
        words = f"{name}: {number(value)} tok/s, {_times(step.ratio)} of {top} ({step.change})"
        data.append({"cell": name, "from": whole, "to": value, "says": words,
                     "kind": "loses" if value < whole else "gains"})  # fmt: skip
    kinds = {"all of it": GREY, "loses": ORANGE, "gains": GREEN}
    spec = row_chart(
        [str(d["cell"]) for d in data],
        data={"values": data},
        encoding=says(),
        layer=[
            {"mark": {"type": "bar", "height": 13, "opacity": 0.75},
             "encoding": {"x": amount("generated tok/s", "from", zero=True), "x2": {"field": "to"},
                          "color": {"field": "kind", "type": "nominal", "title": None,
                                    "scale": {"domain": list(kinds), "range": list(kinds.values())}}}},
            {"mark": {"type": "tick", "thickness": 2, "size": 18},
             "encoding": {"x": amount("generated tok/s", "to"), "color": {"value": SOFT}}},
            {"data": {"values": [{"value": whole}]}, "mark": {"type": "rule", "color": SOFT, "strokeDash": [4, 3]},
             "encoding": {"x": amount("generated tok/s"), "y": None, "tooltip": None, "description": None}},
        ],
    )  # fmt: skip
    lines = [[name_cell(base), Cell("the whole"), Cell(number(whole)), Cell(MISSING, why="itself"),
              Cell(MISSING, why="itself")]]  # fmt: skip
    for step in changes:
        low, high = step.ratio.low, step.ratio.high
        interval = Cell(MISSING, why="needs two repeats") if low is None else Cell(f"{low:.2f} to {high:.2f}")
        lines.append([name_cell(step.row), Cell(step.change), Cell(number(step.row.median or 0)),
                      Cell(f"{step.ratio.ratio:.2f}"), interval])  # fmt: skip
    columns = [Column("Cell", numeric=False), Column("Changed", numeric=False, wide=True),
               Column("Throughput", "tok/s"), Column("Of the whole", TIMES_SIGN), Column("95 % interval")]  # fmt: skip
    note = f"Each cell differs from {top} in one thing; a bar is what that costs, or gains."
    return Panel("What each technique is worth", note, spec, plain_table("", columns, lines))


def _times(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.ratio:.2f}{TIMES_SIGN}"
    return f"{ratio.ratio:.2f}{TIMES_SIGN} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _settings(row: CellSummary) -> dict[str, Any]:
    known = settings_of(row.records[-1].spec)
    return {key: value for key, value in known.items() if key not in _LEFT_OUT}


def _change(base: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """In words, the one thing in which they differ; empty where they differ in more or in nothing."""
    apart = [k for k in {**base, **other} if base.get(k) != other.get(k)]
    if not apart or len({_TOGETHER.get(k, k) for k in apart}) > 1:
        return ""
    return one_line(", ".join(f"{k.rpartition('.')[2]} {base.get(k)} to {other.get(k)}" for k in apart))
