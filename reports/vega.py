"""What all charts share: Vega-Lite in the page's own colours, and the library's code for a page without a network."""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

from markupsafe import Markup

from harness.api import HarnessError
from reports.render import write
from reports.summary import CellSummary
from reports.tables import Table

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
#: What its licence asks for with every copy.
_LICENCE = (
    "/* Vega, Vega-Lite, vega-embed: (c) University of Washington Interactive Data Lab and others, BSD-3-Clause */\n"
)
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
    "text": {"color": INK},
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """A chart with its figures as a table, for those who cannot see or point at it. `note` is one sentence on how to
    read it."""

    title: str
    note: str
    spec: Spec
    table: Table | None

    @property
    def height(self) -> int:
        """About how high the chart will be, in pixels: the place that is kept free for it."""
        return int(self.spec["height"]) + 60


def chart(height: int, **parts: Any) -> Spec:
    """A specification as wide as its place on the page and so many pixels high."""
    sizes = {"width": "container", "height": height, "autosize": {"type": "fit-x", "contains": "padding"}}
    return {"$schema": _SCHEMA, **sizes, "config": _CONFIG, **parts}


def row_chart(labels: Sequence[str], **parts: Any) -> Spec:
    """A specification with a row for each label: `encoding` gets the axis of rows."""
    encoding = {"y": rows_axis(labels), **parts.pop("encoding")}
    return chart(_ROW * max(1, len(labels)), encoding=encoding, **parts)


def says() -> dict[str, Any]:
    """Encoding of what a mark says, which is its datum's `says`: on demand, and to a screen reader."""
    words = {"field": "says", "type": "nominal"}
    return {"tooltip": words, "description": words}


def rows_axis(labels: Sequence[str]) -> dict[str, Any]:
    """A row for each label, in this order."""
    return {"field": "cell", "type": "nominal", "title": None, "scale": {"domain": list(labels)},
            "axis": {"grid": True, "gridDash": [1, 3]}}  # fmt: skip


def amount(title: str, field: str = "value", **scale: Any) -> dict[str, Any]:
    """A quantity along an axis, with thousands separators."""
    return {"field": field, "type": "quantitative", "title": title, "axis": {"format": ",~r", "tickCount": 6},
            "scale": scale}  # fmt: skip


def log_toggle(smallest: float, largest: float) -> dict[str, Any]:
    """For the page's switch between a linear and a logarithmic axis: the other scale."""
    return {
        "toggle": {"label": "Logarithmic axis", "scale": {"type": "log", "domain": [smallest * 0.9, largest * 1.1]}}
    }


def labelled(rows: Iterable[CellSummary], most: int = MOST_CELLS) -> list[tuple[CellSummary, str]]:
    """The first cells, as many as are drawn, each with a label: its name and what qualifies its figures.

    Cells of one name are numbered.
    """
    found: list[tuple[CellSummary, str]] = []
    taken: Counter[str] = Counter()
    for row in islice(rows, most):
        taken[row.name] += 1
        name = row.name if taken[row.name] == 1 else f"{row.name} ({taken[row.name]})"
        kinds = ["reference"] * row.reference + ["simulated"] * row.simulated + ["projected"] * row.projected
        found.append((row, f"{name} ({', '.join(kinds)})" if kinds else name))
    return found


def left_out(rows: Sized, most: int = MOST_CELLS) -> str:
    """A sentence on cells that are not drawn; empty where all are."""
    return f" The first {most} of {len(rows)} cells are drawn." if len(rows) > most else ""


def library(cache: Path | None = None) -> Markup | None:
    """Vega, Vega-Lite and vega-embed as one script, from the package vl-convert-python; None without it.

    Making it takes more than a second, so it is kept in `cache`.
    """
    try:
        known = version("vl-convert-python")
    except PackageNotFoundError:
        return None
    kept = cache / f"vega-{known}.js" if cache else None
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

    code: str = _LICENCE + vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # inside a page no script may hold the end of one, not even in a string; the two are the same to JavaScript
    return re.sub("</(?=script)", r"<\\/", code, flags=re.IGNORECASE)
