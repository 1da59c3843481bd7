"""Charts with a row for each cell (throughput, bound, memory, tiers, tasks), and predicted against measured."""

from collections.abc import Sequence

from reports import figures, vega
from reports.figures import allowed
from reports.stats import interval_of
from reports.summary import CellSummary, throughput
from reports.tables import MOST_ROWS, Cell, Column, Table, cell_table, name_cell, plain_table
from reports.text import GIB, MIB, MISSING, columns_of, number, span
from reports.vega import Datum, Panel, datum, layer


def throughput_panel(rows: Sequence[CellSummary]) -> Panel | None:
    """Each repeat's throughput, the median and its interval; None where no cell has a throughput."""
    rows = [r for r in rows if r.median is not None]
    if not rows:
        return None
    shown = rows[: vega.MOST_CELLS]
    reach = {r.fingerprint: (*r.throughput, *(interval_of(r.throughput) or ())) for r in shown}
    fastest = max((max(reach[r.fingerprint]) for r in shown if not r.reference), default=0.0)
    largest = max(map(max, reach.values()))
    # a much faster reference must not compress the axis of the other cells
    end = largest if largest <= 1.5 * fastest or not fastest else 1.1 * fastest
    data: list[Datum] = []
    for row in shown:
        known: Datum = {"cell": row.label, "ranked": not row.qualifiers}
        if interval := interval_of(row.throughput):
            low, high = interval
            words = f"{row.label}: 95 % interval of the median {span(low, high)} tok/s"
            data.append(known | {"kind": "interval", "low": low, "high": high, "tooltip": words})
        median = row.median or 0.0
        words = f"{row.label}: median {number(median)} tok/s of {len(row.throughput)} launches"
        data.append(known | {"kind": "median", "value": median, "tooltip": words})
        data += [
            known | {"kind": "repeat", "value": v, "tooltip": f"{row.label}, repeat {r.repeat + 1}: {number(v)} tok/s"}
            for r in row.ok_records
            if (v := throughput(r)) is not None
        ]
    for point in data:  # an arrow at the end of the axis stands for a value beyond it
        if point.get("value", 0.0) > end:
            point |= {"kind": "beyond"}
    colour = {"condition": {"test": "datum.ranked", "value": vega.BLUE}, "value": vega.GREY}
    x = vega.quantity("generated tok/s", domain=[0, end * 1.02], clamp=True, nice=False)
    # the page's axis switch applies this scale
    logarithmic = {"type": "log", "domain": [min(map(min, reach.values())) * 0.9, largest * 1.1]}
    spec = vega.row_chart(
        data,
        usermeta={"toggle": {"label": "Logarithmic axis", "scale": logarithmic}},
        encoding={"color": colour},
        layer=[
            layer({"type": "bar", "height": 9, "opacity": 0.3}, "datum.kind === 'interval'",
                  x=x | {"field": "low"}, x2={"field": "high"}),
            layer({"type": "point", "size": 40, "filled": True, "opacity": 0.85}, "datum.kind === 'repeat'", x=x),
            layer({"type": "tick", "thickness": 3, "size": 18}, "datum.kind === 'median'", x=x),
            layer({"type": "point", "shape": "triangle-right", "size": 70, "filled": True}, "datum.kind === 'beyond'",
                  x=x),
        ],
    )  # fmt: skip
    few = f" The table has the first {MOST_ROWS}." if len(rows) > MOST_ROWS else ""
    note = f"Dots are launches, ticks their medians, bands the 95 % intervals.{vega.truncation_note(rows)}{few}"
    return Panel("Generation throughput", note, spec, _repeats_table(rows))


def bound_panel(rows: Sequence[CellSummary]) -> Panel | None:
    """Measured throughput against the throughput that compute, disk and link allow; None without a bound."""
    rows = [r for r in rows if r.bound_tok_s is not None and r.median]
    if not rows:
        return None
    data: list[Datum] = []
    shapes = {"compute allows": "square", "disk allows": "triangle-right", "measured": "circle"}
    colours = {"compute allows": vega.GREEN, "disk allows": vega.ORANGE, "measured": vega.BLUE}
    links = any(allowed(row, "link_s") for row in rows)
    if links:
        shapes["link allows"], colours["link allows"] = "diamond", vega.GREY
    for row in rows[: vega.MOST_CELLS]:
        limits = (allowed(row, "compute_s"), allowed(row, "disk_s"), row.median, allowed(row, "link_s"))
        data += [
            datum(row, f"{kind} {number(value)} tok/s", kind=kind, value=value)
            for kind, value in zip(shapes, limits, strict=False)
            if value
        ]
    scale = {"type": "log", "domain": [min(d["value"] for d in data) * 0.8, max(d["value"] for d in data) * 1.25]}
    spec = vega.row_chart(
        data,
        mark={"type": "point", "filled": True, "size": 80},
        encoding={
            "x": vega.quantity("tok/s, logarithmic") | {"scale": scale},
            "shape": vega.category("kind", shapes),
            "color": vega.category("kind", colours),
        },
    )
    slowest = "slowest of compute, disk and copies to the device" if links else "slower of compute and disk"
    note = f"The bound for a cell's batch is the {slowest} at rates measured around each launch."
    note += vega.truncation_note(rows)
    table = cell_table("", rows, figures.BOUND_OF_DEVICE if links else figures.BOUND)
    return Panel("What the machine allows", note, spec, table)


def memory_panel(rows: Sequence[CellSummary]) -> Panel | None:
    """Peak host memory against its limit; None where no cell has a peak."""
    rows = [r for r in rows if r.peak_bytes is not None]
    if not rows:
        return None
    data: list[Datum] = []
    for row in rows[: vega.MOST_CELLS]:
        data += [
            datum(row, f"{kind} {number(size / MIB)} MiB", kind=kind, value=size / GIB)
            for kind, size in (("peak", row.peak_bytes), ("limit", row.limit_bytes))
            if size is not None
        ]
    spec = vega.row_chart(
        data,
        encoding={"x": vega.quantity("GiB", zero=True)},
        layer=[
            layer({"type": "bar", "height": 12, "color": vega.BLUE, "opacity": 0.55}, "datum.kind === 'peak'"),
            layer({"type": "tick", "thickness": 3, "size": 20, "color": vega.ORANGE}, "datum.kind === 'limit'"),
        ],
    )
    note = "Bars are the peak of the engine's process tree, ticks the limit: idle footprint + budget."
    note += vega.truncation_note(rows)
    return Panel("Peak memory against the limit", note, spec, cell_table("", rows, figures.MEMORY))


#: Colours of the tiers, fastest first.
_TIERS = {"device": vega.GREEN, "RAM": vega.BLUE, "disk": vega.ORANGE}


def tiers_panel(rows: Sequence[CellSummary]) -> Panel | None:
    """Each cell's weights by tier, with the tiers' limits; None where no engine reports them."""
    placed = [r for r in rows if any(x.load and sum(x.load.weights_by_tier) for x in r.ok_records)]
    if not placed:
        return None
    data: list[Datum] = []
    for row in placed[: vega.MOST_CELLS]:
        tiers = next(x.load.weights_by_tier for x in reversed(row.ok_records) if x.load)
        data += [
            datum(row, f"{number(size / GIB)} GiB of weights in {kind}", kind=kind, value=size / GIB, order=i)
            for i, (kind, size) in enumerate(zip(_TIERS, tiers, strict=True))
            if size
        ]
        for kind, limit in (("device", row.spec.limits.device_memory), ("RAM", row.spec.limits.host_memory)):
            if limit is not None:
                words = f"the limit of {kind} is {number(limit / GIB)} GiB for weights, cache and activations"
                data.append(datum(row, words, kind=kind, limit=limit / GIB))
    axis = "GiB of weights; ticks are limits"
    spec = vega.row_chart(
        data,
        encoding={"color": vega.category("kind", _TIERS)},
        layer=[
            layer({"type": "bar", "height": 14}, "isValid(datum.value)",
                  x=vega.quantity(axis, zero=True), order={"field": "order"}),
            layer({"type": "tick", "thickness": 3, "size": 22, "opacity": 1}, "isValid(datum.limit)",
                  x=vega.quantity(axis, "limit")),
        ],
    )  # fmt: skip
    with_policy = [r for r in placed if figures.realised_policy(r)]
    table = cell_table("", with_policy, figures.PLACEMENT) if with_policy else None
    note = "Weights as the engine placed them. A limit also covers KV cache and activations."
    return Panel("Memory by tier", note + vega.truncation_note(placed), spec, table)


def tasks_panel(rows: Sequence[CellSummary]) -> Panel | None:
    """Time of a generated token by task; overlapping time counts for each. None where no engine keeps a timeline."""
    rows = [r for r in rows if r.median and figures.task_ms_per_token(r, "products") is not None]
    if not rows:
        return None
    data: list[Datum] = []
    for row in rows[: vega.MOST_CELLS]:
        data += [
            datum(row, f"{kind} {number(ms)} ms a token", kind=kind, value=ms, order=i)
            for i, (key, kind) in enumerate(figures.TASK_NAMES.items())
            if (ms := figures.task_ms_per_token(row, key))
        ]
        data.append(datum(row, f"all together {number(whole := 1000 / (row.median or 1.0))} ms a token", whole=whole))
    colours = [*vega.COLOURS[: len(figures.TASK_NAMES) - 1], vega.GREY]
    axis = "milliseconds of a generated token"
    spec = vega.row_chart(
        data,
        layer=[
            vega.alone_in_legend("kind") | layer(
                {"type": "bar", "height": 14}, "isValid(datum.value)", x=vega.quantity(axis, zero=True),
                color=vega.category("kind", dict(zip(figures.TASK_NAMES.values(), colours, strict=True))),
                opacity={"condition": {"param": "alone", "value": 1}, "value": 0.12}, order={"field": "order"}),
            layer({"type": "tick", "thickness": 3, "size": 22, "color": vega.INK}, "isValid(datum.whole)",
                  x=vega.quantity(axis, "whole")),
        ],
    )  # fmt: skip
    note = ("Per generated token, because cells may run jobs of different sizes. Ticks are the time of a token all "
            "together: overlapping time counts for each task. Click a task in the legend to highlight it.")  # fmt: skip
    note += vega.truncation_note(rows)
    return Panel("Breakdown by task", note, spec, cell_table("", rows, figures.TASKS))


def predicted_panel(rows: Sequence[CellSummary]) -> Panel | None:
    """Predicted against measured throughput, with the line of equality; None without a prediction."""
    rows = [r for r in rows if r.median and r.predicted_tok_s and r.kind != "simulated"]
    if not rows:
        return None
    data = [
        datum(r, f"predicted {number(r.predicted_tok_s or 0)}, measured {number(r.median or 0)} tok/s",
              measured=r.median, value=r.predicted_tok_s)
        for r in rows
    ]  # fmt: skip
    both = [d[axis] for d in data for axis in ("measured", "value")]
    ends = [min(both) * 0.8, max(both) * 1.25]
    scale = {"type": "log", "domain": ends, "nice": False}
    line = [{"measured": v, "value": v, "tooltip": "prediction equals measurement"} for v in ends]
    x, y = vega.quantity("measured tok/s", "measured"), vega.quantity("predicted tok/s")
    spec = vega.chart(
        320,
        encoding={"x": x | {"scale": scale}, "y": y | {"scale": scale}},
        layer=[
            layer({"type": "line", "color": vega.SOFT, "strokeDash": [4, 3]}, data=line),
            layer({"type": "point", "filled": True, "size": 70, "color": vega.BLUE, "opacity": 0.8}, data=data,
                  **vega.tooltip()),
        ],
    )  # fmt: skip
    note = (
        "On the dashed line prediction equals measurement; above it the prediction is too fast. Axes are logarithmic."
    )
    return Panel("Predicted against measured", note, spec, cell_table("", rows, figures.PREDICTED))


def _repeats_table(rows: Sequence[CellSummary]) -> Table:
    count = max(len(r.throughput) for r in rows)
    columns = [Column("Cell", numeric=False), Column("Median", "tok/s"), Column("95 % interval", "tok/s")]
    columns += [Column(f"Repeat {i + 1}", "tok/s") for i in range(count)]
    lines = []
    for row in rows[:MOST_ROWS]:
        interval = interval_of(row.throughput)
        middle, *speeds = columns_of([row.median, *row.throughput])
        shown = Cell(span(*interval)) if interval else Cell(MISSING, why="needs three launches")
        missing = [Cell(MISSING, why="not run, or not ok")] * (count - len(speeds))
        lines.append([name_cell(row), Cell(middle), shown, *map(Cell, speeds), *missing])
    return plain_table("", columns, lines)
