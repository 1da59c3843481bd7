"""One pass of an engine as lanes of time, and as a Chrome trace file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.api import RunRecord, TraceEvent, to_json, union_length
from reports.charts import Linear
from reports.summary import CellSummary
from reports.text import number, one_line


@dataclass(frozen=True)
class Lane:
    """What ran in one lane: (start, width, title) of each event in percent, and the share of the pass in words."""

    name: str
    spans: tuple[tuple[float, float, str], ...]
    value: str


@dataclass(frozen=True)
class Timeline:
    """One pass of one cell. Ticks are (percent, label)."""

    name: str
    axis: str
    ticks: tuple[tuple[float, str], ...]
    lanes: tuple[Lane, ...]


def timelines(rows: Sequence[CellSummary]) -> tuple[Timeline, ...]:
    """The kept pass of each cell's last repeat, for engines that keep one; all on the same scale."""
    traced = [(row, record.trace) for row in rows if (record := _last_traced(row.ok_records))]
    if not traced:
        return ()
    axis = Linear(max(_end(events) for _, events in traced) / 1e6)
    return tuple(_timeline(one_line(row.name), events, axis) for row, events in traced)


def chrome_trace(records: Iterable[RunRecord]) -> dict[str, str]:
    """Chrome trace JSON by cell name, of the last repeat that has one; opens in Perfetto and chrome://tracing."""
    cells: dict[str, list[RunRecord]] = {}
    for record in records:
        cells.setdefault(record.spec.name, []).append(record)
    found = {name: _last_traced(repeats) for name, repeats in cells.items()}
    return {
        re.sub(r"[^A-Za-z0-9._-]", "-", name): json.dumps({"traceEvents": to_json(r.trace)})
        for name, r in found.items()
        if r
    }


def _last_traced(records: Sequence[RunRecord]) -> RunRecord | None:
    return next((r for r in reversed(records) if r.trace), None)


def _timeline(name: str, events: Sequence[TraceEvent], axis: Linear) -> Timeline:
    length = _end(events)
    lanes = []
    for lane in dict.fromkeys(e.cat for e in sorted(events, key=lambda e: e.tid)):
        own = [e for e in events if e.cat == lane]
        spans = tuple(
            (axis.at(e.ts / 1e6), axis.at(e.dur / 1e6), one_line(f"{e.name}: {number(e.dur / 1e3)} ms")) for e in own
        )
        busy = union_length((e.ts, e.ts + e.dur) for e in own) / length if length else 0.0
        lanes.append(Lane(one_line(lane), spans, f"{number(100 * busy)} %"))
    return Timeline(name, "s; on the right the share of the pass", axis.ticks, tuple(lanes))


def _end(events: Sequence[TraceEvent]) -> float:
    return max(e.ts + e.dur for e in events)
