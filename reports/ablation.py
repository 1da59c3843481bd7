"""Ablations: cells of an engine that differ from a base cell in a single setting, and what the change costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.api import RunSpec
from reports.records import settings_of
from reports.stats import Ratio, ratio_of
from reports.summary import CellSummary, ranked
from reports.tables import Cell, Column, name_cell, plain_table
from reports.text import MISSING, TIMES_SIGN, number, one_line
from reports.vega import GREEN, GREY, MOST_CELLS, ORANGE, SOFT, Panel, category, datum, layer, quantity, row_chart

#: The sequences at once are no technique, but often change with one: what memory leaves decides them.
_SEQUENCES = "sequences at once"
#: Settings that only make sense together count as a single one.
_GROUPS: Mapping[str, str] = {
    "policy.num_gpu_batches": "schedule",
    "policy.schedule": "schedule",
    "policy.weights": "placement",
    "policy.cache": "placement",
    "policy.activations": "placement",
    "policy.nano_batches": "nano-batches",
    "policy.nano_overlap": "nano-batches",
    "policy.weight_bits": "bits",
    "policy.kv_bits": "bits",
}
#: Settings that are no technique; the sequences at once stand for the batch.
_IGNORED = (
    *RunSpec.LABELS, "warmup", "seed", "launcher", "image", "workload.num_requests", "policy.gpu_batch_size"
)  # fmt: skip


@dataclass(frozen=True)
class Ablation:
    """A cell, the technique in which it differs from the base cell, and its throughput ratio to it.

    `sequences`: how the sequences at once changed with it, which is part of the ratio; empty where they did not.
    """

    row: CellSummary
    change: str
    sequences: str
    ratio: Ratio


def ablations(rows: Sequence[CellSummary]) -> tuple[CellSummary, list[Ablation]] | None:
    """The base cell and its ablations, smallest loss first; None with fewer than two ablations.

    The base is the cell from which most others of its engine and limits differ in one technique; the fastest of equals.
    """
    rows = ranked(rows)[:MOST_CELLS]
    settings = {r.fingerprint: _settings(r) for r in rows}
    candidates: list[tuple[CellSummary, list[Ablation]]] = []
    for base in rows:
        alike = [r for r in rows if r is not base and (r.engine, r.spec.limits) == (base.engine, base.spec.limits)]
        cells = [
            Ablation(r, *change, ratio_of(base.throughput, r.throughput))
            for r in alike
            if (change := _change(settings[base.fingerprint], settings[r.fingerprint]))
        ]
        candidates += [(base, cells)] if len(cells) >= 2 else []
    if not candidates:
        return None
    base, cells = max(candidates, key=lambda candidate: len(candidate[1]))
    return base, sorted(cells, key=lambda a: -a.ratio.ratio)


def ablation_panel(rows: Sequence[CellSummary]) -> Panel | None:
    """A waterfall chart: what each single change costs or gains against the base cell."""
    ablation = ablations(rows)
    if ablation is None:
        return None
    base, cells = ablation
    base_speed = base.median or 0.0
    data = [datum(base, f"{number(base_speed)} tok/s", kind="base cell", to=base_speed, pure=True) | {"from": 0.0}]
    for cell in cells:
        value = cell.row.median or 0.0
        change = "; ".join(filter(None, (cell.change, cell.sequences)))
        words = f"{number(value)} tok/s, {_times(cell.ratio)} of {base.label} ({change})"
        kind, pure = "loses" if value < base_speed else "gains", not (cell.change and cell.sequences)
        data.append(datum(cell.row, words, kind=kind, to=value, pure=pure) | {"from": base_speed})
    kinds = {"base cell": GREY, "loses": ORANGE, "gains": GREEN}
    spec = row_chart(
        data,
        layer=[
            layer({"type": "bar", "height": 13}, x=quantity("generated tok/s", "from", zero=True),
                  x2={"field": "to"}, color=category("kind", kinds),
                  opacity={"condition": {"test": "datum.pure", "value": 0.75}, "value": 0.3}),
            layer({"type": "tick", "thickness": 2, "size": 18}, x=quantity("generated tok/s", "to"),
                  color={"value": SOFT}),
            layer({"type": "rule", "color": SOFT, "strokeDash": [4, 3]}, data=[{"value": base_speed}],
                  x=quantity("generated tok/s"), y=None, tooltip=None, description=None),
        ],
    )  # fmt: skip
    missing = Cell(MISSING, why="the base cell")
    same = Cell(MISSING, why="the same as the base cell's")
    lines = [[name_cell(base), Cell("base cell"), missing, Cell(number(base_speed)), missing, missing]]
    for cell in cells:
        low, high = cell.ratio.low, cell.ratio.high
        interval = Cell(MISSING, why="needs three launches") if low is None else Cell(f"{low:.2f} to {high:.2f}")
        lines.append([name_cell(cell.row), Cell(cell.change) if cell.change else same,
                      Cell(cell.sequences) if cell.sequences else same, Cell(number(cell.row.median or 0)),
                      Cell(f"{cell.ratio.ratio:.2f}"), interval])  # fmt: skip
    columns = [Column("Cell", numeric=False), Column("Technique", numeric=False, wide=True),
               Column(_SEQUENCES.capitalize(), numeric=False), Column("Throughput", "tok/s"),
               Column("Of the base cell", TIMES_SIGN), Column("95 % interval")]  # fmt: skip
    note = f"Each cell differs from {base.label} in one technique; its bar is what that costs or gains."
    if any(cell.change and cell.sequences for cell in cells):
        note += f" Pale bars are not the technique's alone: the {_SEQUENCES} changed with it."
    return Panel("What each technique is worth", note, spec, plain_table("", columns, lines))


def _times(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.ratio:.2f}{TIMES_SIGN}"
    return f"{ratio.ratio:.2f}{TIMES_SIGN} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _settings(row: CellSummary) -> dict[str, Any]:
    chosen = row.records[-1].settings if row.records else {}  # by a search among candidates
    settings = {key: value for key, value in {**settings_of(row.spec), **chosen}.items() if key not in _IGNORED}
    return settings | {_SEQUENCES: row.batch}


def _change(base: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str] | None:
    """Describes the technique that differs, and how the sequences at once do; None where several differ, or none."""
    keys = [k for k in {**base, **other} if base.get(k) != other.get(k)]
    techniques = [k for k in keys if k != _SEQUENCES]
    if not keys or len({_GROUPS.get(k, k) for k in techniques}) > 1:
        return None
    words = [f"{k.rpartition('.')[2]} {base.get(k)} to {other.get(k)}" for k in techniques]
    sequences = f"{base[_SEQUENCES]} to {other[_SEQUENCES]}" if _SEQUENCES in keys else ""
    return one_line(", ".join(words)), sequences
