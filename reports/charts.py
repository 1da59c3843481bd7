"""Chart geometry: axes and marks in percent of the width, so that SVG stretches and its text does not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports.summary import CellSummary, throughput
from reports.tables import allowed, name_cell
from reports.text import MIB, number


@dataclass(frozen=True)
class Mark:
    """Something drawn in a row: kind is bar, dot, median, limit, compute, disk or beyond; `at` is in percent."""

    kind: str
    at: float
    title: str


@dataclass(frozen=True)
class Row:
    """One cell in a chart: its marks and the value in words. `reason` stands in where there is nothing to draw."""

    name: str
    badges: tuple[str, ...]
    value: str
    marks: tuple[Mark, ...]
    reference: bool
    hollow: bool
    reason: str = ""

    @property
    def spoken(self) -> str:
        """The row for a screen reader."""
        return f"{self.name}: {self.reason or '; '.join(m.title for m in self.marks if m.kind != 'bar')}"


@dataclass(frozen=True)
class Chart:
    """Rows over one axis; ticks are (percent, label), the legend (kind, meaning)."""

    title: str
    axis: str
    ticks: tuple[tuple[float, str], ...]
    legend: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]


class Linear:
    """An axis from zero to a round number at or above `largest`."""

    def __init__(self, largest: float) -> None:
        largest = largest or 1.0
        step = _nice(largest / 5)
        self.top = step * math.ceil(round(largest / step, 6))
        count = round(self.top / step)
        places = max(0, -math.floor(math.log10(step)))
        self.ticks = tuple((100.0 * i / count, number(i * step, places)) for i in range(count + 1))

    def at(self, value: float) -> float:
        """Position of `value` in percent."""
        return 100 * value / self.top


class Log:
    """An axis over whole decades around positive values."""

    def __init__(self, smallest: float, largest: float) -> None:
        self.low = math.floor(math.log10(smallest))
        self.high = max(math.ceil(math.log10(largest)), self.low + 1)
        stride = math.ceil((self.high - self.low) / 6)
        powers = range(self.low, self.high + 1, stride)
        self.ticks = tuple((self._percent(p), number(10.0**p, max(0, -p))) for p in powers)

    def at(self, value: float) -> float:
        """Position of `value` in percent."""
        return self._percent(math.log10(value))

    def _percent(self, exponent: float) -> float:
        return 100 * (exponent - self.low) / (self.high - self.low)


def throughput_chart(rows: Sequence[CellSummary]) -> Chart | None:
    """Every repeat as a dot on a bar to the median; None where no cell gave a figure."""
    drawn = [r for r in rows if r.median is not None]
    if not drawn:
        return None
    axis = _axis([(r, v) for r in drawn for v in r.throughput])
    lines = []
    for row in rows:
        marks: list[Mark] = []
        if row.median is not None:
            marks += [Mark("bar", axis.at(row.median), ""), _median(row, axis)]
            marks += [
                Mark("dot", axis.at(v), f"repeat {r.repeat + 1}: {number(v)} tok/s")
                for r in row.ok_records
                if (v := throughput(r)) is not None
            ]
        lines.append(_row(row, marks, number(row.median) if row.median is not None else ""))
    return _chart("Generation throughput", "tok/s", axis, {"bar": "median", "dot": "one repeat"}, lines)


def memory_chart(rows: Sequence[CellSummary]) -> Chart | None:
    """Peak memory as a bar, the limit as a line; None where nothing was counted."""
    if not any(r.peak_bytes is not None for r in rows):
        return None
    axis = _axis([(r, b / MIB) for r in rows for b in (r.peak_bytes, r.limit_bytes) if b is not None])
    lines = []
    for row in rows:
        marks = []
        value = ""
        if row.peak_bytes is not None:
            peak = row.peak_bytes / MIB
            marks += [Mark("bar", axis.at(peak), ""), Mark("median", axis.at(peak), f"peak {number(peak)} MiB")]
            value = number(peak)
        if row.limit_bytes is not None:
            limit = row.limit_bytes / MIB
            marks.append(Mark("limit", axis.at(limit), f"limit {number(limit)} MiB"))
            value += f" of {number(limit)}" if value else ""
        lines.append(_row(row, marks, value))
    return _chart("Peak memory against the limit", "MiB", axis, {"bar": "peak", "limit": "limit"}, lines)


def bound_chart(rows: Sequence[CellSummary]) -> Chart | None:
    """Measured throughput beside what compute and disk each allow, on a logarithmic axis."""
    kinds = {"compute": "compute allows", "disk": "disk allows", "dot": "measured"}
    found: list[tuple[CellSummary, dict[str, float]]] = []
    for row in rows:
        if row.bound_tok_s is None or not row.median:
            continue
        values: dict[str, float | None] = {
            "compute": allowed(row, "compute_s"),
            "disk": allowed(row, "disk_s"),
            "dot": row.median,
        }
        found.append((row, {k: v for k, v in values.items() if v}))
    if not found:
        return None
    everything = [v for _, values in found for v in values.values()]
    axis = Log(min(everything), max(everything))
    lines = []
    for row, positive in found:
        marks = [Mark(k, axis.at(v), f"{kinds[k]} {number(v)} tok/s") for k, v in positive.items()]
        lines.append(_row(row, marks, f"{number((row.bound_fraction or 0) * 100)} %"))
    axis_title = "tok/s, logarithmic; on the right the fraction of the bound reached"
    return _chart("What the machine allows", axis_title, axis, kinds, lines)


def spark(samples: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Points (x, y) in percent for samples over the run, zero at the bottom and the largest near the top."""
    top = max(samples, default=0) or 1
    width = max(len(samples) - 1, 1)
    return tuple((4 + 92 * i / width, 90 - 75 * v / top) for i, v in enumerate(samples))


def _axis(values: Sequence[tuple[CellSummary, float]]) -> Linear:
    """An axis for the cells that compete; a reference far above them runs off it rather than squeezing them."""
    largest = max(v for _, v in values)
    own = max((v for r, v in values if not r.reference), default=largest)
    return Linear(largest if largest <= 1.5 * own else own)


def _chart(title: str, unit: str, axis: Linear | Log, legend: Mapping[str, str], rows: Sequence[Row]) -> Chart:
    beyond = any(m.kind == "beyond" for r in rows for m in r.marks)
    kinds = dict(legend) | ({"beyond": "beyond the axis"} if beyond else {})
    return Chart(title, unit, axis.ticks, tuple(kinds.items()), tuple(rows))


def _clip(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    """Marks on the axis as they are; those past its end become one arrow that says what they were."""
    off = [m for m in marks if m.at > 100.01]
    if not off:
        return tuple(marks)
    bar = [Mark("bar", 100.0, "")] if any(m.kind == "bar" for m in off) else []
    arrow = Mark("beyond", 100.0, "; ".join(m.title for m in off if m.title))
    return (*bar, *(m for m in marks if m not in off), arrow)


def _row(row: CellSummary, marks: Sequence[Mark], value: str) -> Row:
    reason = "" if marks else f"{row.status} (expected)" if row.expected_failure else row.status
    hollow = row.simulated or row.projected
    return Row(row.name, name_cell(row).badges, value, _clip(marks), row.reference, hollow, reason)


def _median(row: CellSummary, axis: Linear) -> Mark:
    value = row.median or 0
    return Mark("median", axis.at(value), f"median {number(value)} tok/s of {len(row.throughput)}")


def _nice(step: float) -> float:
    """The nearest of 1, 2, 5 times a power of ten at or above `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999)
