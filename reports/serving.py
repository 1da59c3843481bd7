"""Online workloads: latency against rate, the highest rate within the objectives, token latencies, and the queue."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.api import ServedRate, ServedRequest, Slo
from harness.common.percentile import percentile
from harness.common.serving_figures import answered, attainment, cached_tokens, figures, gaps, values
from reports import vega
from reports.quantiles import quantile_interval
from reports.stats import interval_of, ratio_of
from reports.summary import CellSummary, metric, rival_of
from reports.tables import Cell, Column, Table, name_cell, plain_table
from reports.text import MISSING, columns_of, finite, grouped, median, number, positive, span
from reports.vega import Datum, Panel, layer

#: The most curves, one for each distinct colour; points of a curve.
_MOST_CURVES, _POINTS = len(vega.COLOURS), 120
#: The latency that a chart shows where no objective names one.
_DEFAULT = "normalized_s"
#: Token latencies are shown at this share of the highest rate (NanoFlow, section 6.3).
_SHARE = 0.9
#: Requests per second of a record that are no rate.
_MOST_RATE = 1e9
_WORDS = {"ttft_s": "time to first token", "tpot_s": "time per output token", "normalized_s": "normalized latency"}
_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)
_MISSING_RANGE = "too few requests for an interval"


@dataclass(frozen=True)
class _Pooled:
    """The launches of a cell at one rate, and all their requests."""

    row: CellSummary
    rate: float | None
    launches: tuple[ServedRate, ...]

    @property
    def requests(self) -> list[ServedRequest]:
        return [request for launch in self.launches for request in launch.requests]

    @property
    def unanswered(self) -> int:
        """How many requests have no latency: refused, failed or unfinished."""
        return sum(len(launch.requests) - len(answered(launch)) for launch in self.launches)

    def figure(self, name: str) -> float | None:
        """The median of a figure over the launches."""
        return median([figures(launch, self.row.spec.workload.slo).get(name) for launch in self.launches])


def serving_panels(rows: Sequence[CellSummary]) -> list[Panel]:
    """The panels of an online workload; none for any other."""
    pooled = [p for row in rows for p in _pooled(row)]
    if not pooled:
        return []
    shown = [_at_reported_rate(row, [p for p in pooled if p.row is row]) for row in rows]
    reported = [p for p in shown if p is not None]
    panels = [_rates(pooled), _highest(rows), _rounds(reported), _token_latencies(reported), _queue(reported)]
    return [panel for panel in panels if panel]


def _pooled(row: CellSummary) -> list[_Pooled]:
    served = [sound for record in row.ok_records for launch in record.served if (sound := _sound(launch)).requests]
    by_rate = grouped(served, lambda launch: launch.rate)
    rates = sorted(by_rate, key=lambda rate: -1.0 if rate is None else rate)
    return [_Pooled(row, rate, tuple(by_rate[rate])) for rate in rates]


def _sound(launch: ServedRate) -> ServedRate:
    """The launch without requests whose times are no times: records are read as they are."""
    if finite(launch.window_s) is None or (launch.rate is not None and not 0 <= launch.rate < _MOST_RATE):
        return replace(launch, requests=())
    kept = (r for r in launch.requests if all(finite(t) is not None for t in (r.due_s, r.sent_s, *r.token_times_s)))
    return replace(launch, requests=tuple(kept))


def _highest_of(row: CellSummary) -> list[float]:
    """The highest rate within the objectives of each launch that found one."""
    found = [record.metrics.get("highest_req_s") for record in row.ok_records]
    return [rate for rate in map(positive, found) if rate]


def _always_within(row: CellSummary) -> bool:
    """Whether every launch found a rate within the objectives: else those that did say little of the cell."""
    found = [record.metrics.get("highest_req_s") for record in row.ok_records]
    return bool(found) and all(map(positive, found))


def _at_reported_rate(row: CellSummary, pooled: Sequence[_Pooled]) -> _Pooled | None:
    """The rate whose latencies are shown: of a sweep the measured one nearest to 90 % of the highest within."""
    highest = median(_highest_of(row)) or (max((p.rate or 0.0 for p in pooled), default=0.0))
    return min(pooled, key=lambda p: abs((p.rate or 0.0) - _SHARE * highest), default=None)


def _objective(slo: Slo | None) -> tuple[str, float | None, float | None]:
    """The latency that a chart shows, its limit, and at which quantile; None for the mean."""
    name, limit = next(iter(slo.limits.items()), (_DEFAULT, None)) if slo else (_DEFAULT, None)
    quantile = None if slo is None or slo.attainment == "mean" else float(slo.attainment)
    return name, limit, quantile


def _rates(pooled: Sequence[_Pooled]) -> Panel:
    name, limit, quantile = _objective(pooled[0].row.spec.workload.slo)
    statistic = "mean" if quantile is None else f"p{100 * quantile:g}"
    cells = list(dict.fromkeys(p.row.label for p in pooled))[:_MOST_CURVES]
    data: list[Datum] = []
    for p in pooled:
        sample = values(p.requests, name)
        if not sample or p.rate is None or p.row.label not in cells:
            continue
        value = statistics.fmean(sample) if quantile is None else percentile(sample, 100 * quantile)
        words = f"{p.row.label}: {statistic} {number(value or 0.0)} s at {number(p.rate)} requests/s"
        ends = quantile_interval(sample, quantile) if quantile is not None else None
        reach = {"low": ends[0], "high": ends[1]} if ends else {}
        data.append({"cell": p.row.label, "rate": p.rate, "value": value, "tooltip": words} | reach)
    by_cell = vega.distinct("cell", cells)
    x = vega.quantity("requests per second", "rate", nice=True)
    y = vega.quantity(f"{_WORDS[name]}, {statistic}, seconds", nice=True)
    layers = [
        vega.alone_in_legend("cell") | layer({"type": "line", "strokeWidth": 2}),
        layer({"type": "rule", "opacity": 0.5}, "isValid(datum.high)", y=y | {"field": "low"}, y2={"field": "high"}),
        layer({"type": "point", "filled": True, "size": 60}, shape=by_cell["shape"], **vega.tooltip()),
    ]
    if limit is not None:
        objective: list[Datum] = [{"value": limit, "tooltip": f"the objective: {number(limit)} s"}]
        line = {"type": "rule", "color": vega.ORANGE, "strokeDash": [6, 4]}
        layers.append({"mark": line, "data": {"values": objective}, "encoding": {"y": y, **vega.tooltip()}})
    encoding = {"x": x, "y": y, "color": by_cell["color"]}
    if limit is not None:  # its layer has neither a rate nor a cell
        for each in layers[:-1]:
            each["encoding"] = encoding | each.get("encoding", {})
        encoding = {}
    spec = vega.chart(320, data={"values": data}, layer=layers, encoding=encoding)
    note = "Latencies count from when a request was due."
    note += "" if quantile is None else " Bars are 95 % intervals of the quantile over requests."
    note += " The dashed line is the objective." if limit is not None else ""
    note += _without_answers(pooled)
    return Panel("Latency against rate", note, spec, _rates_table(pooled))


def _without_answers(pooled: Sequence[_Pooled]) -> str:
    """That latencies are of answered requests only, where some were not answered."""
    missing = sum(p.unanswered for p in pooled)
    if not missing:
        return ""
    return f" {missing:,} of {sum(len(p.requests) for p in pooled):,} requests were not answered: they have no latency."


def _rates_table(pooled: Sequence[_Pooled]) -> Table:
    lossy = any(p.unanswered for p in pooled)
    slo = pooled[0].row.spec.workload.slo
    names = [("Offered", "req/s", "offered_req_s"), ("Completed", "req/s", "completed_req_s"),
             ("Output", "tok/s", "generation_throughput_tok_s")]  # fmt: skip
    names += [("Goodput", "req/s", "goodput_req_s")] if slo else []
    latencies = {"First token": "ttft", "Per token": "tpot", "Normalized": "normalized"}
    names += [(f"{title} p{q}", "s", f"{short}_p{q}_s") for title, short in latencies.items() for q in (50, 99)]
    columns = [Column("Cell", numeric=False), Column("Rate", "req/s"), Column("Requests")]
    columns += [Column("Unanswered")] if lossy else []
    columns += [Column(title, unit) for title, unit, _ in names]
    columns += [Column("Within", "%")] if slo else []
    texts = [columns_of([p.figure(key) for p in pooled]) for _, _, key in names]
    lines = []
    for i, p in enumerate(pooled):
        rate = "closed loop" if p.row.spec.workload.concurrency else MISSING
        rate = "alone" if p.rate == 0 else rate if p.rate is None else number(p.rate)
        line = [name_cell(p.row), Cell(rate), Cell(str(len(p.requests)))]
        line += [Cell(str(p.unanswered))] if lossy else []
        line += [Cell(column[i]) for column in texts]
        if slo:
            own = p.row.spec.workload.slo or slo
            shares = [attainment(launch, own) for launch in p.launches]
            line.append(Cell(number(100 * (median(shares) or 0.0))))
        lines.append(line)
    return plain_table("", columns, lines)


def _highest(rows: Sequence[CellSummary]) -> Panel | None:
    """The highest rate within the objectives of each cell; None where none was swept."""
    swept = [r for r in rows if metric(r.ok_records, "highest_req_s") is not None]
    if not swept:
        return None
    order = sorted(swept, key=lambda r: -(metric(r.ok_records, "highest_req_s") or 0.0))
    highest = [metric(r.ok_records, "highest_req_s") or 0.0 for r in order]
    data = [
        vega.datum(row, f"{number(value)} requests/s", value=value) for row, value in zip(order, highest, strict=True)
    ]
    spec = vega.row_chart(
        data[: vega.MOST_CELLS],
        mark={"type": "bar", "height": 14, "color": vega.BLUE},
        encoding={"x": vega.quantity("highest requests per second within the objectives", zero=True)},
    )
    columns = [Column("Cell", numeric=False), Column("Highest rate", "req/s"), Column("95 % interval", "req/s"),
               Column("To best rival", "\u00d7"), Column("Saturated", "tok/s")]  # fmt: skip
    lines = []
    for row, text in zip(order, columns_of(highest), strict=True):
        rates, rival = _highest_of(row), rival_of(row, [r for r in order if r is not row and _always_within(r)])
        ends = interval_of(rates) if _always_within(row) else None
        shown = Cell(span(*ends)) if ends else Cell(MISSING, why="needs three launches, each with a rate within")
        ratio = Cell(MISSING, why="no rival, or a launch without a rate within the objectives")
        if rival is not None and _always_within(row):
            found = ratio_of(_highest_of(rival), rates)
            reach = f" [{span(found.low, found.high, ', ')}]" if found.low and found.high else ""
            ratio = Cell(f"{number(found.ratio)}{reach}", why=f"against {rival.name}")
        saturated = metric(row.ok_records, "saturated_tok_s")
        most = Cell(MISSING) if saturated is None else Cell(number(saturated))
        lines.append([name_cell(row), Cell(text), shown, ratio, most])
    note = "Rates are told apart to about 9 %: an interval of zero width means that all launches agree within that."
    return Panel("Highest rate within the objectives", note, spec, plain_table("", columns, lines))


def _rounds(reported: Sequence[_Pooled]) -> Panel | None:
    """What conversations that come back cost by round, and how much of their prompts a cache spared."""
    if all(request.round == 0 for p in reported for request in p.requests):
        return None
    columns = [Column("Cell", numeric=False), Column("Round"), Column("Answers"), Column("Prompt", "tokens"),
               Column("Computed", "tokens"), Column("Spared", "%"), Column("First token p50", "s"),
               Column("First token p99", "s")]  # fmt: skip
    lines, data = [], list[Datum]()
    cells = [p.row.label for p in reported[:_MOST_CURVES]]
    for p in reported:
        by_round = grouped([r for r in p.requests if r.outcome == "ok" and r.token_times_s], lambda r: r.round)
        for turn, requests in sorted(by_round.items()):
            prompt, spared = sum(r.prompt_tokens for r in requests), cached_tokens(requests)
            told = [Cell(MISSING, why="the engine does not tell")] * 2
            if spared is not None and prompt:
                told = [Cell(number((prompt - spared) / len(requests))), Cell(number(100 * spared / prompt))]
            first = [number(percentile(values(requests, "ttft_s"), q) or 0.0) for q in (50, 99)]
            lines.append([name_cell(p.row), Cell(str(turn + 1)), Cell(str(len(requests))),
                          Cell(number(prompt / len(requests))), *told, *map(Cell, first)])  # fmt: skip
            words = f"{p.row.label}, round {turn + 1}: first token after {first[0]} s, of {len(requests)} answers"
            value = percentile(values(requests, "ttft_s"), 50)
            if p.row.label in cells:
                data.append({"cell": p.row.label, "round": turn + 1, "value": value, "tooltip": words})
    by_cell = vega.distinct("cell", cells)
    spec = vega.chart(
        240,
        data={"values": data},
        encoding={"x": vega.quantity("round", "round", nice=True) | {"axis": {"tickMinStep": 1, "format": "d"}},
                  "y": vega.quantity("seconds to first token, median", zero=True), "color": by_cell["color"]},
        layer=[vega.alone_in_legend("cell") | layer({"type": "line", "strokeWidth": 2}),
               layer({"type": "point", "filled": True, "size": 60}, shape=by_cell["shape"], **vega.tooltip())],
    )  # fmt: skip
    note = "Means over the answers of a round. A prompt is the whole conversation so far; what a cache of keys and "
    note += "values spared of it was not computed again."
    return Panel("Conversations by round", note, spec, plain_table("", columns, lines))


def _token_latencies(reported: Sequence[_Pooled]) -> Panel | None:
    """The cumulative distribution of the seconds between tokens, and percentiles of all latencies with intervals."""
    curves = [(p, sample) for p in reported if len(sample := sorted(gaps(p.requests))) > 1]
    if not curves:
        return None
    cells = [p.row.label for p, _ in curves[:_MOST_CURVES]]
    data: list[Datum] = []
    for p, sample in curves[:_MOST_CURVES]:
        for i in range(_POINTS + 1):
            at = sample[min(len(sample) - 1, i * len(sample) // _POINTS)]
            words = f"{p.row.label}: {i / _POINTS:.0%} within {number(at)} s"
            data.append({"cell": p.row.label, "at": at, "share": round(i / _POINTS, 4), "tooltip": words})
    spec = vega.chart(
        280,
        data={"values": data},
        encoding={"x": vega.quantity("seconds between tokens", "at", nice=True),
                  "y": vega.quantity("share of tokens", "share", domain=[0, 1]) | {"axis": {"format": ".0%"}},
                  "color": vega.distinct("cell", cells)["color"]},
        layer=[vega.alone_in_legend("cell") | layer({"type": "line", "interpolate": "step-after", "strokeWidth": 2})],
    )  # fmt: skip
    note = f"Of a sweep at the measured rate nearest to {_SHARE:.0%} of the highest within the objectives. Intervals "
    note += "take requests as independent, and those of a launch share its queue: treat them as the least."
    note += _without_answers(reported)
    return Panel("Token latency", note, spec, _percentiles(reported))


def _percentiles(reported: Sequence[_Pooled]) -> Table:
    columns = [Column("Cell", numeric=False), Column("Rate", "req/s"), Column("Latency", numeric=False)]
    columns += [Column(f"p{100 * q:g}", "s, 95 % interval") for q in _QUANTILES] + [Column("p99 / mean")]
    lines = []
    for p in reported:
        samples = {
            "first token": values(p.requests, "ttft_s"),
            "between tokens": gaps(p.requests),
            "normalized": values(p.requests, "normalized_s"),
            "in the queue": values(p.requests, "queue_s"),
        }
        for title, sample in samples.items():
            if not sample:
                continue
            line = [name_cell(p.row), Cell(MISSING if p.rate is None else number(p.rate)), Cell(title)]
            for q in _QUANTILES:
                ends = quantile_interval(sample, q)
                value = number(percentile(sample, 100 * q) or 0.0)
                line.append(Cell(f"{value} [{span(*ends, ', ')}]") if ends else Cell(value, why=_MISSING_RANGE))
            mean = statistics.fmean(sample)
            line.append(Cell(number((percentile(sample, 99) or 0.0) / mean) if mean else MISSING))
            lines.append(line)
    return plain_table("", columns, lines)


def _queue(reported: Sequence[_Pooled]) -> Panel | None:
    """Requests that were due and not answered, over the time of each cell's last launch."""
    cells = [p.row.label for p in reported[:_MOST_CURVES]]
    data: list[Datum] = []
    for p in reported[:_MOST_CURVES]:
        for at, waiting in in_system(p.launches[-1]):
            words = f"{p.row.label}: {waiting} requests due and not answered at {number(at)} s"
            data.append({"cell": p.row.label, "at": at, "value": waiting, "tooltip": words})
    if not data:
        return None
    spec = vega.chart(
        240,
        data={"values": data},
        encoding={"x": vega.quantity("seconds since the load began", "at", nice=True),
                  "y": vega.quantity("requests due and not answered", zero=True),
                  "color": vega.distinct("cell", cells)["color"]},
        layer=[vega.alone_in_legend("cell") | layer({"type": "line", "interpolate": "step-after"})],
    )  # fmt: skip
    note = "A queue that grows to the end means that the rate is beyond what the engine can hold."
    return Panel("Requests in the system", note, spec, None)


def in_system(launch: ServedRate) -> list[tuple[float, int]]:
    """Seconds since the load began, and requests that were due and not answered then; at most some hundred points."""
    changes = [(r.due_s, 1) for r in launch.requests]
    changes += [(r.token_times_s[-1] if r.token_times_s else r.sent_s, -1) for r in launch.requests]
    count, steps = 0, []
    for at, change in sorted(changes, key=lambda c: (c[0], -c[1])):
        count += change
        steps.append((at, count))
    every = max(1, len(steps) // _POINTS)
    return [*steps[::every], *steps[-1:]]
