"""Latency: what throughput costs in it, and how it is spread over requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness.api import RunRecord
from reports.summary import CellSummary, metric
from reports.tables import Cell, Column, Table, name_cell, plain_table
from reports.text import columns_of, finite, median, number
from reports.vega import (
    COLOURS,
    SHAPES,
    SOFT,
    Datum,
    Panel,
    amount,
    chart,
    labelled,
    left_out,
    says,
)

#: Points of a cumulative curve: enough for its shape at any size of page.
_QUANTILES = 60
#: Points with a name beside them; more would hide each other.
_MOST_NAMES = 16
#: Curves that can be told apart.
_MOST_CURVES = len(COLOURS)


def request_latency(row: CellSummary) -> float | None:
    """Median time (s) of a request from its start to its last token; of predictions, of a block of them."""
    found = median([median(_latencies(r)) for r in row.ok_records])
    return metric(row.ok_records, "block_latency_s") if found is None else found


def pareto_panel(rows: Sequence[CellSummary]) -> Panel | None:
    """Throughput over a request's latency, with the line of those that nothing beats in both; None below two cells."""
    points = [(r, at) for r in rows if r.ok and r.median and (at := request_latency(r))]
    if len(points) < 2:
        return None
    front = pareto_front([(at, r.median or 0.0) for r, at in points if not r.reference])
    data: list[Datum] = []
    for (row, label), (_, at) in zip(labelled((r for r, _ in points), len(points)), points, strict=True):
        of = "reference" if row.reference else row.engine
        words = f"{label}: {number(row.median or 0)} tok/s, {number(at)} s a request"
        data.append({"name": label, "engine": of, "latency": at, "value": row.median, "says": words})
    line = [{"latency": at, "value": value, "says": "nothing is better in both"} for at, value in front]
    engines = sorted({str(d["engine"]) for d in data})
    kind = {"field": "engine", "type": "nominal", "title": None}
    scale = _scale(p for _, p in points)
    y_scale = _scale(r.median or 0.0 for r, _ in points)
    spec = chart(
        320,
        encoding={"x": amount("median seconds of a request, first to last token", "latency") | {"scale": scale},
                  "y": amount("generated tok/s") | {"scale": y_scale}},
        layer=[
            {"data": {"values": line}, "mark": {"type": "line", "interpolate": "step-after", "color": SOFT,
             "strokeDash": [4, 3]}},
            {"data": {"values": data}, "params": [
                {"name": "alone", "select": {"type": "point", "fields": ["engine"]}, "bind": "legend"}],
             "mark": {"type": "point", "filled": True, "size": 90},
             "encoding": {
                "color": kind | {"scale": {"domain": engines, "range": _cycle(COLOURS, engines)}},
                "shape": kind | {"scale": {"domain": engines, "range": _cycle(SHAPES, engines)}},
                "opacity": {"condition": {"param": "alone", "value": 0.9}, "value": 0.1}, **says()}},
            {"data": {"values": data if len(data) <= _MOST_NAMES else []},
             "mark": {"type": "text", "align": "left", "dx": 7, "dy": -8, "fontSize": 11, "color": SOFT, "limit": 180},
             "encoding": {"text": {"field": "name"}}},
        ],
    )  # fmt: skip
    best = set(front)
    lines = [
        [name_cell(row), Cell(text), Cell(number(row.median or 0)),
         Cell("yes" if (at, row.median) in best and not row.reference else "")]
        for (row, at), text in zip(points, columns_of([at for _, at in points]), strict=True)
    ]  # fmt: skip
    columns = [Column("Cell", numeric=False), Column("Request", "s, median"), Column("Throughput", "tok/s"),
               Column("On the line", numeric=False)]  # fmt: skip
    note = (
        "On the dashed line no cell is both faster and quicker to answer. A click in the legend puts an engine alone."
    )
    return Panel("Latency and throughput", note, spec, plain_table("", columns, lines))


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (latency, throughput), those that no other one equals or beats in both, by latency."""
    front: list[tuple[float, float]] = []
    for latency, speed in sorted(set(points), key=lambda p: (p[0], -p[1])):
        if not front or speed > front[-1][1]:
            front.append((latency, speed))
    return front


def spread_panels(rows: Sequence[CellSummary]) -> list[Panel]:
    """Cumulative curves over requests of the time to the first token, and of the time of each after it."""
    kinds = (("Time to first token", "TTFT", _first), ("Time per output token", "TPOT", _per_token))
    panels = []
    for title, short, get in kinds:
        curves = [(r, times) for r in rows if len(times := sorted(t for x in r.ok_records for t in get(x))) > 1]
        if not curves:
            continue
        shown = curves[:_MOST_CURVES]
        labels = [label for _, label in labelled((r for r, _ in curves), _MOST_CURVES)]
        data = [
            {
                "cell": label,
                "at": [float(f"{at:.4g}") for at, _ in curve],
                "share": [round(part, 4) for _, part in curve],
            }
            for label, (_, times) in zip(labels, shown, strict=True)
            for curve in [_cumulative(times)]
        ]  # fmt: skip
        largest, smallest = max(times[-1] for _, times in shown), min(times[0] for _, times in shown)
        cell = {"field": "cell", "type": "nominal", "title": None}
        spec = chart(
            280,
            data={"values": data},
            transform=[
                {"flatten": ["at", "share"]},
                {"as": "says", "calculate":
                 "datum.cell + ': ' + format(datum.share, '.0%') + ' within ' + format(datum.at, '.3~g') + ' s'"},
            ],
            encoding={
                "x": amount(f"{short}, seconds", "at") | {"scale": _scale([smallest, largest])},
                "y": amount("share of requests", "share") | {"axis": {"format": ".0%"}, "scale": {"domain": [0, 1]}},
                "color": cell | {"scale": {"domain": labels, "range": _cycle(COLOURS, labels)}},
                "opacity": {"condition": {"param": "alone", "value": 1}, "value": 0.1},
            },
            layer=[
                {"params": [{"name": "alone", "select": {"type": "point", "fields": ["cell"]}, "bind": "legend"}],
                 "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2}},
                {"mark": {"type": "point", "filled": True, "size": 24},
                 "encoding": says() | {"shape": cell | {"scale": {"domain": labels, "range": _cycle(SHAPES, labels)}}}},
            ],
        )  # fmt: skip
        note = "Requests of all repeats. A click in the legend puts a cell alone." + left_out(curves, _MOST_CURVES)
        panels.append(Panel(f"{title} ({short})", note, spec, _percentiles(curves)))
    return panels


def _percentiles(curves: Sequence[tuple[CellSummary, Sequence[float]]]) -> Table:
    parts = (0.5, 0.9, 0.95, 0.99)
    columns = [Column("Cell", numeric=False), Column("Requests"), *(Column(f"p{100 * p:.0f}", "s") for p in parts),
               Column("Largest", "s")]  # fmt: skip
    lines = []
    for row, times in curves:
        texts = columns_of([*(_quantile(times, p) for p in parts), times[-1]])
        lines.append([name_cell(row), Cell(str(len(times))), *map(Cell, texts)])
    return plain_table("", columns, lines)


def _quantile(ordered: Sequence[float], part: float) -> float:
    """The least value that this part of all does not exceed."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def _cumulative(ordered: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of values up to it), at most so many points, the last of them all."""
    n = len(ordered)
    ranks = sorted({max(1, math.ceil(n * i / _QUANTILES)) for i in range(_QUANTILES + 1)})
    return [(ordered[rank - 1], rank / n) for rank in ranks]


def _latencies(record: RunRecord) -> list[float]:
    ends = [(t.token_times_s[-1] - t.start_s) for t in record.requests if t.token_times_s]
    return [v for v in ends if finite(v) is not None and v > 0]


def _first(record: RunRecord) -> list[float]:
    times = [t.token_times_s[0] - t.start_s for t in record.requests if t.token_times_s]
    return [v for v in times if finite(v) is not None and v > 0]


def _per_token(record: RunRecord) -> list[float]:
    spans = [
        (t.token_times_s[-1] - t.token_times_s[0]) / (len(t.token_times_s) - 1)
        for t in record.requests
        if len(t.token_times_s) > 1
    ]
    return [v for v in spans if finite(v) is not None and v > 0]


def _scale(values: Iterable[float]) -> dict[str, object]:
    """Logarithmic where values span more than one and a half decades."""
    positive = [v for v in values if v > 0]
    if positive and max(positive) / min(positive) > 30:
        return {"type": "log", "nice": True}
    return {"type": "linear", "nice": True, "zero": False}


def _cycle(choices: Sequence[str], names: Sequence[str]) -> list[str]:
    return [choices[i % len(choices)] for i in range(len(names))]
