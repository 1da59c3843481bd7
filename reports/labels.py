"""Places the labels of a scatter chart so that no two overlap, at any width of the chart."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

#: Height of a label, pixels: a line of the chart's text of 11.
GAP = 15.0
#: The most points that get labels.
MOST_LABELS = 30
#: Labels that moved less need no line to their point, pixels.
_NEAR = 5.0
#: From a line to the middle of the label above it, pixels.
_ABOVE = 8.0
#: Values that span a larger factor are drawn on a logarithmic axis.
_LOGARITHMIC = 30


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis with a fixed domain, so that places on it are known before it is drawn."""

    low: float
    high: float
    logarithmic: bool

    @classmethod
    def of(cls, values: Iterable[float]) -> "Axis":
        """The axis that shows these values with room at both ends; logarithmic where they span a factor above 30."""
        values = list(values)
        low, high = min(values), max(values)
        if low > 0 and high / low > _LOGARITHMIC:
            room = (high / low) ** 0.06
            return cls(low / room, high * room, True)
        room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        return cls(low - room, high + room, False)

    @property
    def scale(self) -> dict[str, Any]:
        """The axis as a scale of Vega-Lite."""
        return {"type": "log" if self.logarithmic else "linear", "domain": [self.low, self.high], "nice": False}

    def share(self, value: float) -> float:
        """How far along the axis a value lies, 0 to 1."""
        low, high, value = (math.log(v) if self.logarithmic else v for v in (self.low, self.high, value))
        return (value - low) / (high - low)

    def value(self, share: float) -> float:
        """The value that lies so far along the axis."""
        if self.logarithmic:
            return float(self.low * (self.high / self.low) ** share)
        return self.low + share * (self.high - self.low)


def spread(wanted: Sequence[float], low: float, high: float, gap: float = GAP) -> list[float]:
    """The places nearest to those `wanted`, by least squares, in their order, `gap` apart, between `low` and `high`.

    Without their gaps ordered places are an isotonic regression (Barlow and Brunk 1972), whose bounds only clip it.
    Raises ValueError where there is no room for all.
    """
    from scipy.optimize import isotonic_regression

    last = high - gap * (len(wanted) - 1)
    if last < low:
        raise ValueError(f"{len(wanted)} labels of {gap} need more than {high - low}")
    if not wanted:
        return []
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    fitted = isotonic_regression([wanted[i] - gap * rank for rank, i in enumerate(order)]).x
    places = [0.0] * len(wanted)
    for rank, (i, place) in enumerate(zip(order, fitted, strict=True)):
        places[i] = min(max(float(place), low), last) + gap * rank
    return places


def height_for(labels: int, least: float) -> int:
    """The height of a chart, pixels, that has room for so many labels."""
    return math.ceil(max(least, (labels + 1) * GAP))


def labels(
    points: Sequence[tuple[str, float, float]], x: Axis, y: Axis, height: float,
    lined: Collection[tuple[float, float]] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """A datum for the label of each (name, x, y): its point, the value `at` where it stands, and on which side.

    Each label has a height of its own, so that none overlaps another however wide the chart is. Labels of points on the
    right stand to the left of them. Labels of points `lined` (x, y), through which a line goes, stand above it.
    """
    wanted = [y.share(value) * height + _ABOVE * ((across, value) in lined) for _, across, value in points]
    places = spread(wanted, GAP / 2, height - GAP / 2)
    return [
        {"name": name, "x": across, "y": up, "at": y.value(place / height), "left": x.share(across) > 0.5,
         "moved": abs(place - want) > _NEAR}
        for (name, across, up), place, want in zip(points, places, wanted, strict=True)
    ]  # fmt: skip


def layers(data: Sequence[dict[str, Any]], colour: str) -> list[dict[str, Any]]:
    """Layers of Vega-Lite that draw `labels`, each with a line to its point where it had to move."""
    x, at = ({"field": field, "type": "quantitative"} for field in ("x", "at"))
    # points have the same names for those who listen
    rule = {"type": "rule", "color": colour, "opacity": 0.5, "aria": False}
    text = {"type": "text", "fontSize": 11, "color": colour, "limit": 180, "baseline": "middle", "aria": False}
    drawn = [
        {"mark": rule, "transform": [{"filter": "datum.moved"}],
         "encoding": {"x": x, "y": {"field": "y", "type": "quantitative"}, "y2": {"field": "at"}}},
        {"mark": text | {"align": "left", "dx": 8}, "transform": [{"filter": "!datum.left"}],
         "encoding": {"x": x, "y": at, "text": {"field": "name"}}},
        {"mark": text | {"align": "right", "dx": -8}, "transform": [{"filter": "datum.left"}],
         "encoding": {"x": x, "y": at, "text": {"field": "name"}}},
    ]  # fmt: skip
    return [{"data": {"values": data}, **layer} for layer in drawn] if data else []
