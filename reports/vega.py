"""What all charts share: Vega-Lite in the page's own colours, and the library's code for a page without a network."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from markupsafe import Markup

from harness.api import HarnessError
from reports.render import write
from reports.summary import CellSummary
from reports.tables import Table

T = TypeVar("T")
Spec = Mapping[str, Any]
Datum = dict[str, Any]

#: More cells than this make a chart that nobody reads; the tables have them all.
MOST_CELLS = 60
#: Told apart with any colour vision, in both themes; shapes tell them apart as well.
COLOURS = tuple(f"var(--series-{i})" for i in range(1, 9))
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-left", "triangle-right")
BLUE, ORANGE, GREEN, GREY, INK, SOFT, RULE = (
    f"var(--{name})" for name in ("blue", "orange", "green", "grey", "ink", "soft", "rule")
)
#: Pixels of a row.
_ROW = 26
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
_CONFIG = {
    "background": "transparent",
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": INK, "titleColor": SOFT, "gridColor": RULE, "tickColor": RULE, "domainColor": RULE,
        "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 400, "labelLimit": 260, "labelFont": _FONT,
    },
    "axisY": {"domain": False, "ticks": False, "labelPadding": 8},
    "legend": {
        "labelColor": INK, "titleColor": SOFT, "orient": "top", "title": None, "labelFontSize": 12, "labelLimit": 260,
        "symbolStrokeWidth": 2, "columns": 4,
    },
    "header": {"labelColor": INK, "labelFontSize": 12, "title": None},
    "text": {"color": INK},
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """A chart with its figures as a table, for those who cannot see or point at it. `note` is one sentence on how to
    read it; `spec` is None where a table alone says it best."""

    title: str
    note: str
    spec: Spec | None
    table: Table | None

    @property
    def height(self) -> int:
        """About how high the chart will be, in pixels: the place that is kept free for it."""
        return 0 if self.spec is None else int(self.spec["height"]) + 60


def chart(height: int, **parts: Any) -> Spec:
    """A specification as wide as its place on the page and so many pixels high."""
    sizes = {"width": "container", "height": height, "autosize": {"type": "fit-x", "contains": "padding"}}
    return {"$schema": _SCHEMA, **sizes, "config": _CONFIG, **parts}


def row_chart(labels: Sequence[str], **parts: Any) -> Spec:
    """A specification with a row for each label: `encoding` gets the axis of rows."""
    encoding = {"y": rows_axis(labels), **parts.pop("encoding")}
    return chart(_ROW * max(1, len(labels)), encoding=encoding, **parts)


def says(field: str = "says") -> dict[str, Any]:
    """Encoding of what a mark says: on demand, and to a screen reader."""
    return {
        "tooltip": {"field": field, "type": "nominal"},
        "description": {"field": field, "type": "nominal"},
    }


def rows_axis(labels: Sequence[str]) -> dict[str, Any]:
    """A row for each label, in this order."""
    return {"field": "cell", "type": "nominal", "title": None, "scale": {"domain": list(labels)},
            "axis": {"grid": True, "gridDash": [1, 3]}}  # fmt: skip


def amount(title: str, field: str = "value", **scale: Any) -> dict[str, Any]:
    """A quantity along an axis, with thousands separators."""
    return {"field": field, "type": "quantitative", "title": title, "axis": {"format": "~s", "tickCount": 6},
            "scale": scale}  # fmt: skip


def log_toggle(smallest: float, largest: float) -> dict[str, Any]:
    """For the page's switch between a linear and a logarithmic axis: the other scale."""
    return {
        "toggle": {"label": "Logarithmic axis", "scale": {"type": "log", "domain": [smallest * 0.9, largest * 1.1]}}
    }


def labels_of(rows: Iterable[CellSummary]) -> dict[str, str]:
    """A name for each cell, by fingerprint; cells of one name are numbered."""
    found: dict[str, str] = {}
    taken: dict[str, int] = {}
    for row in rows:
        taken[row.name] = taken.get(row.name, 0) + 1
        found[row.fingerprint] = row.name if taken[row.name] == 1 else f"{row.name} ({taken[row.name]})"
    return found


def marked(row: CellSummary, label: str) -> str:
    """A cell's label with what qualifies its figures."""
    kinds = ["reference"] * row.reference + ["simulated"] * row.simulated + ["projected"] * row.projected
    return f"{label} ({', '.join(kinds)})" if kinds else label


def drawn(rows: Sequence[T]) -> Sequence[T]:
    """As many cells as a chart can hold, from the first."""
    return rows[:MOST_CELLS]


def left_out(rows: Collection[CellSummary]) -> str:
    """A sentence on cells that are not drawn; empty where all are."""
    return f" The first {MOST_CELLS} of {len(rows)} cells are drawn." if len(rows) > MOST_CELLS else ""


def library(cache: Path | None = None) -> Markup | None:
    """Vega, Vega-Lite and vega-embed as one script, from the package vl-convert-python; None without it.

    Making it takes more than a second, so it is kept in `cache`.
    """
    try:
        import vl_convert  # noqa: F401
    except ImportError:
        return None
    kept = cache / f"vega-{version('vl-convert-python')}.js" if cache else None
    if kept is not None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return Markup(kept.read_text(encoding="utf-8"))
    code = _made()
    if kept is not None:
        with contextlib.suppress(HarnessError):  # a cache that cannot be written costs a second
            write(kept, code)
    return Markup(code)


@functools.cache
def _made() -> str:
    import vl_convert

    code: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # inside a page no script may hold the end of one, not even in a string; the two are the same to JavaScript
    return re.sub("</(?=script)", r"<\\/", code, flags=re.IGNORECASE)
