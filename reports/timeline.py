"""An engine's timeline of one pass: utilisation by resource as a chart, and Chrome trace files."""

import hashlib
import json
from collections.abc import Iterable, Sequence

from harness.api import RunRecord, TraceEvent, to_json
from harness.common.files import safe_name
from harness.common.intervals import union_length
from reports.summary import CellSummary
from reports.tables import Cell, Column, Table, name_cell, plain_table
from reports.text import grouped, number, one_line
from reports.vega import BLUE, GREEN, GREY, ORANGE, Datum, Panel, category, quantity, row_chart, truncation_note

#: Equal parts of a pass, each with its utilisation.
_BINS = 80
#: The most cells that the chart draws; each takes several rows.
_MOST_CELLS = 6
_COLOURS = {"load": ORANGE, "compute": BLUE, "attention": GREEN, "send": GREEN}
#: What a rank does when it has nothing to do.
_WAIT = "wait"


def utilisation_panel(rows: Sequence[CellSummary]) -> Panel | None:
    """Utilisation of each lane over the traced pass of each cell's last repeat; None without a trace."""
    traced = [(row, record.trace) for row in rows if (record := _last_traced(row.ok_records))]
    if not traced:
        return None
    data: list[Datum] = []
    for row, events in traced[:_MOST_CELLS]:
        end = _end(events)
        data += [
            {"cell": f"{row.label}: {lane}", "lane": what, "does": f" {'busy' if what == lane else what} at ",
             "width": end / 1e6 / _BINS,
             "shares": [round(share, 3) for share in busy(each, end)]}
            for (lane, what), each in _drawn(events).items()
        ]  # fmt: skip
    lanes = list(dict.fromkeys(str(d["lane"]) for d in data))
    spec = row_chart(
        data,
        transform=[
            {"flatten": ["shares"], "as": ["share"]},
            {"window": [{"op": "row_number", "as": "bin"}], "groupby": ["cell", "lane"]},
            {"calculate": "(datum.bin - 1) * datum.width", "as": "at"},
            {"calculate": "datum.bin * datum.width", "as": "to"},
            {"as": "tooltip", "calculate":
             "datum.cell + ' ' + format(datum.share, '.0%') + datum.does + format(datum.at, '.3~g') + ' s'"},
        ],
        mark={"type": "rect", "height": 16},
        encoding={
            "x": quantity("seconds of the pass", "at"),
            "x2": {"field": "to"},
            "color": category("lane", {lane: _COLOURS.get(lane, GREY) for lane in lanes}),
            "opacity": {"field": "share", "type": "quantitative", "legend": None,
                        "scale": {"domain": [0, 1], "range": [0.04, 1]}},
        },
    )  # fmt: skip
    note = "Darker is busier. The folder traces has the pass as a Chrome trace, for Perfetto."
    if any(event.pid for _, events in traced for event in events):
        note += " Each rank has a lane with what it does."
    note += truncation_note(traced, _MOST_CELLS)
    return Panel("Utilisation by resource over one pass", note, spec, _table(traced))


def busy(events: Sequence[TraceEvent], end: float, bins: int = _BINS) -> list[float]:
    """The busy share of each of `bins` equal parts of the time from 0 to `end`, in the events' unit."""
    width = end / bins or 1.0
    shares = []
    for i in range(bins):
        low, high = i * width, (i + 1) * width
        inside = ((max(e.ts, low), min(e.ts + e.dur, high)) for e in events if e.ts < high and e.ts + e.dur > low)
        shares.append(min(1.0, union_length(inside) / width))
    return shares


def chrome_trace(records: Iterable[RunRecord]) -> dict[str, str]:
    """Chrome trace JSON by a file name for the cell, from the last repeat with a trace; Perfetto and chrome://tracing
    open it."""
    traces: dict[str, str] = {}
    taken: set[str] = set()  # in lower case: some file systems ignore case
    for fingerprint, repeats in grouped(records, lambda r: r.fingerprint).items():
        if traced := _last_traced(repeats):
            name = safe_name(traced.spec.name)
            if name.lower() in taken:
                name += "-" + hashlib.sha256(fingerprint.encode(errors="surrogatepass")).hexdigest()[:8]
            taken.add(name.lower())
            traces[name] = json.dumps({"traceEvents": to_json(traced.trace)})
    return traces


def _table(traced: Sequence[tuple[CellSummary, Sequence[TraceEvent]]]) -> Table:
    """The busy share of each lane over the pass; a rank that waits is not busy."""
    lanes = list(dict.fromkeys(lane for _, events in traced for lane in _lanes(events)))
    columns = [Column("Cell", numeric=False), Column("Pass", "s"), *(Column(lane, "% busy") for lane in lanes)]
    lines = []
    for row, events in traced:
        by_lane, end = _lanes(events), _end(events)
        shares = [busy(by_lane.get(lane, ()), end, bins=1)[0] for lane in lanes]
        lines.append([name_cell(row), Cell(number(end / 1e6)), *(Cell(number(100 * s)) for s in shares)])
    return plain_table("", columns, lines)


def _lanes(events: Sequence[TraceEvent]) -> dict[str, list[TraceEvent]]:
    """The events in which each lane is busy."""
    lanes: dict[str, list[TraceEvent]] = {}
    for event in _ordered(events):
        lane = lanes.setdefault(one_line(event.cat), [])
        if not (event.pid and event.name == _WAIT):
            lane.append(event)
    return lanes


def _drawn(events: Sequence[TraceEvent]) -> dict[tuple[str, str], list[TraceEvent]]:
    """Events by lane and by what is drawn there in a colour of its own: the lane itself, or what a rank does."""
    return grouped(_ordered(events), lambda e: (one_line(e.cat), one_line(e.name if e.pid else e.cat)))


def _ordered(events: Sequence[TraceEvent]) -> list[TraceEvent]:
    return sorted(events, key=lambda e: (e.pid, e.tid))


def _last_traced(records: Sequence[RunRecord]) -> RunRecord | None:
    return next((r for r in reversed(records) if r.trace), None)


def _end(events: Sequence[TraceEvent]) -> float:
    return max(e.ts + e.dur for e in events)
