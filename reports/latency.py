"""Latency charts: throughput against latency, and the distribution of TTFT and TPOT over requests."""

import math
from collections.abc import Iterable, Sequence

from harness.api import RunRecord
from reports import vega
from reports.labels import MOST_LABELS, Axis, height_for, labels, layers
from reports.summary import CellSummary, metric
from reports.tables import Cell, Column, Table, name_cell, plain_table
from reports.text import columns_of, finite, median, number
from reports.vega import Datum, Panel, layer

#: Points of a cumulative curve.
_QUANTILES = 60
#: The most curves, one for each distinct colour.
_MOST_CURVES = len(vega.COLOURS)


def request_latency(row: CellSummary) -> float | None:
    """Median seconds from the start of a request to its last token; for predictions, of a block of requests."""
    measured = median([median(_latencies(r)) for r in row.ok_records])
    return metric(row.ok_records, "block_latency_s") if measured is None else measured


def pareto_panel(rows: Sequence[CellSummary]) -> Panel | None:
    """Throughput against request latency, with the Pareto front; None below two cells."""
    points = [(r, latency) for r in rows if r.ok and r.median and (latency := request_latency(r))]
    if len(points) < 2:
        return None
    front = pareto_front([(latency, r.median or 0.0) for r, latency in points if not r.reference])
    data: list[Datum] = []
    for row, latency in points:
        engine = "reference" if row.reference else row.engine
        words = f"{row.label}: {number(row.median or 0)} tok/s, {number(latency)} s a request"
        data.append({"name": row.label, "engine": engine, "latency": latency, "value": row.median, "tooltip": words})
    line = [{"latency": latency, "value": value, "tooltip": "Pareto front"} for latency, value in front]
    engines = sorted({str(d["engine"]) for d in data})
    x, y = Axis.of(latency for _, latency in points), Axis.of(r.median or 0.0 for r, _ in points)
    # the legend says which are references
    named = [(r.label.removesuffix(" (reference)"), latency, r.median or 0.0) for r, latency in points]
    named = named if len(named) <= MOST_LABELS else []
    height = height_for(len(named), 320)
    spec = vega.chart(
        height,
        encoding={"x": vega.quantity("median seconds of a request, first to last token", "latency")
                       | {"scale": x.scale},
                  "y": vega.quantity("generated tok/s") | {"scale": y.scale}},
        layer=[
            layer({"type": "line", "interpolate": "step-after", "color": vega.SOFT, "strokeDash": [4, 3]}, data=line),
            vega.alone_in_legend("engine") | layer(
                {"type": "point", "filled": True, "size": 90}, data=data, **vega.distinct("engine", engines),
                opacity={"condition": {"param": "alone", "value": 0.9}, "value": 0.1}, **vega.tooltip()),
            *layers(labels(named, x, y, height, front), vega.SOFT),
        ],
    )  # fmt: skip
    optimal = set(front)
    lines = [
        [name_cell(row), Cell(text), Cell(number(row.median or 0)),
         Cell("yes" if (latency, row.median) in optimal and not row.reference else "")]
        for (row, latency), text in zip(points, columns_of([latency for _, latency in points]), strict=True)
    ]  # fmt: skip
    columns = [Column("Cell", numeric=False), Column("Request", "s, median"), Column("Throughput", "tok/s"),
               Column("Pareto front", numeric=False)]  # fmt: skip
    note = (
        "The dashed line is the Pareto front: no cell has both more throughput and less latency. Click an engine in "
        "the legend to highlight it."
    )
    return Panel("Latency and throughput", note, spec, plain_table("", columns, lines))


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto-optimal (latency, throughput) points, in order of latency."""
    front: list[tuple[float, float]] = []
    for latency, speed in sorted(set(points), key=lambda p: (p[0], -p[1])):
        if not front or speed > front[-1][1]:
            front.append((latency, speed))
    return front


def spread_panels(rows: Sequence[CellSummary]) -> list[Panel]:
    """Cumulative distributions of TTFT and TPOT over requests."""
    kinds = (("Time to first token", "TTFT", _first_token_times), ("Time per output token", "TPOT", _token_times))
    panels = []
    for title, short, times_of in kinds:
        curves = [(r, times) for r in rows if len(times := sorted(t for x in r.ok_records for t in times_of(x))) > 1]
        if not curves:
            continue
        shown = curves[:_MOST_CURVES]
        data = [{"cell": row.label} | _cumulative(times) for row, times in shown]
        largest, smallest = max(times[-1] for _, times in shown), min(times[0] for _, times in shown)
        by_cell = vega.distinct("cell", [row.label for row, _ in shown])
        spec = vega.chart(
            280,
            data={"values": data},
            transform=[
                {"flatten": ["at", "share"]},
                {"as": "tooltip", "calculate":
                 "datum.cell + ': ' + format(datum.share, '.0%') + ' within ' + format(datum.at, '.3~g') + ' s'"},
            ],
            encoding={
                "x": vega.quantity(f"{short}, seconds", "at") | {"scale": Axis.of([smallest, largest]).scale},
                "y": vega.quantity("share of requests", "share", domain=[0, 1]) | {"axis": {"format": ".0%"}},
                "color": by_cell["color"],
                "opacity": {"condition": {"param": "alone", "value": 1}, "value": 0.1},
            },
            layer=[
                vega.alone_in_legend("cell") | layer({"type": "line", "interpolate": "step-after", "strokeWidth": 2}),
                layer({"type": "point", "filled": True, "size": 24}, shape=by_cell["shape"], **vega.tooltip()),
            ],
        )  # fmt: skip
        note = "Requests of all repeats. Click a cell in the legend to highlight it."
        note += vega.truncation_note(curves, _MOST_CURVES)
        panels.append(Panel(f"{title} ({short})", note, spec, _percentiles(curves)))
    return panels


def _percentiles(curves: Sequence[tuple[CellSummary, Sequence[float]]]) -> Table:
    quantiles = (0.5, 0.9, 0.95, 0.99)
    columns = [Column("Cell", numeric=False), Column("Requests"), *(Column(f"p{100 * q:.0f}", "s") for q in quantiles),
               Column("Largest", "s")]  # fmt: skip
    lines = []
    for row, times in curves:
        texts = columns_of([*(_quantile(times, q) for q in quantiles), times[-1]])
        lines.append([name_cell(row), Cell(str(len(times))), *map(Cell, texts)])
    return plain_table("", columns, lines)


def _quantile(ordered: Sequence[float], quantile: float) -> float:
    """The nearest-rank quantile of sorted values."""
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]


def _cumulative(ordered: Sequence[float]) -> Datum:
    """The cumulative distribution of sorted values: values `at`, and the `share` of values up to each."""
    n = len(ordered)
    ranks = sorted({max(1, math.ceil(n * i / _QUANTILES)) for i in range(_QUANTILES + 1)})
    return {"at": [float(f"{ordered[k - 1]:.4g}") for k in ranks], "share": [round(k / n, 4) for k in ranks]}


def _latencies(record: RunRecord) -> list[float]:
    return _valid(t.token_times_s[-1] - t.start_s for t in record.requests if t.token_times_s)


def _first_token_times(record: RunRecord) -> list[float]:
    return _valid(t.token_times_s[0] - t.start_s for t in record.requests if t.token_times_s)


def _token_times(record: RunRecord) -> list[float]:
    times = (t.token_times_s for t in record.requests if len(t.token_times_s) > 1)
    return _valid((t[-1] - t[0]) / (len(t) - 1) for t in times)


def _valid(seconds: Iterable[float]) -> list[float]:
    return [v for v in seconds if finite(v) is not None and v > 0]
