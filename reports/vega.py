"""Vega-Lite building blocks in the page's colours, and the Vega library inlined for offline pages."""

import contextlib
import functools
import itertools
import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from markupsafe import Markup

from harness.api import HarnessError
from harness.common.regular_file import read_regular
from reports.render import write
from reports.summary import CellSummary
from reports.tables import Table

Spec = Mapping[str, Any]
Datum = dict[str, Any]

#: The most cells that a chart draws; the tables list all.
MOST_CELLS = 60
#: Distinct with any colour vision and in both themes; shapes repeat the distinction.
COLOURS = tuple(f"var(--series-{i})" for i in range(1, 9))
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-left", "triangle-right")
BLUE, ORANGE, GREEN, GREY, INK, SOFT, RULE = (
    f"var(--{name})" for name in ("blue", "orange", "green", "grey", "ink", "soft", "rule")
)
#: Height of a row, pixels.
_ROW = 26
_MAX_SCRIPT = 16 << 20
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
#: The notice that the licence requires in every copy.
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
    """A chart, a note on how to read it, and its figures as a table for readers without sight or pointer."""

    title: str
    note: str
    spec: Spec
    table: Table | None

    @property
    def slug(self) -> str:
        """The title as a part of an address."""
        return re.sub("[^a-z0-9]+", "-", self.title.lower()).strip("-")

    @property
    def height(self) -> int:
        """The estimated height of the chart in pixels, reserved until it is drawn."""
        return int(self.spec["height"]) + 60


def chart(height: int, **parts: Any) -> Spec:
    """A Vega-Lite specification as wide as its container and `height` pixels high."""
    sizes = {"width": "container", "height": height, "autosize": {"type": "fit-x", "contains": "padding"}}
    return {"$schema": _SCHEMA, **sizes, "config": _CONFIG, **parts}


def row_chart(data: Sequence[Datum], **parts: Any) -> Spec:
    """A specification with a row for each cell of `data`, and the data's tooltips."""
    cells = list(dict.fromkeys(datum["cell"] for datum in data))
    row = {"field": "cell", "type": "nominal", "title": None, "scale": {"domain": cells},
           "axis": {"grid": True, "gridDash": [1, 3]}}  # fmt: skip
    encoding = {"y": row, **tooltip(), **parts.pop("encoding", {})}
    return chart(_ROW * max(1, len(cells)), data={"values": data}, encoding=encoding, **parts)


def tooltip() -> dict[str, Any]:
    """An encoding that shows a datum's `tooltip` on hover and reads it to screen readers."""
    field = {"field": "tooltip", "type": "nominal"}
    return {"tooltip": field, "description": field}


def category(field: str, choices: Mapping[str, str]) -> dict[str, Any]:
    """An encoding of a field's values by the colour or the shape chosen for each."""
    return {"field": field, "type": "nominal", "title": None,
            "scale": {"domain": list(choices), "range": list(choices.values())}}  # fmt: skip


def distinct(field: str, names: Sequence[str]) -> dict[str, Any]:
    """An encoding of each of a field's values by a colour and a shape."""
    colours, shapes = (dict(zip(names, itertools.cycle(c), strict=False)) for c in (COLOURS, SHAPES))
    return {"color": category(field, colours), "shape": category(field, shapes)}


def quantity(title: str, field: str = "value", **scale: Any) -> dict[str, Any]:
    """An encoding of a quantity along an axis, with thousands separators."""
    return {"field": field, "type": "quantitative", "title": title, "axis": {"format": ",~r", "tickCount": 6},
            "scale": scale}  # fmt: skip


def alone_in_legend(field: str) -> dict[str, Any]:
    """A parameter `alone`: the value of a field that the reader clicks in the legend."""
    return {"params": [{"name": "alone", "select": {"type": "point", "fields": [field]}, "bind": "legend"}]}


def datum(row: CellSummary, words: str, **fields: Any) -> Datum:
    """A datum of a cell; its tooltip is the cell's label and `words`."""
    return {"cell": row.label, "tooltip": f"{row.label}: {words}", **fields}


def layer(mark: Spec, where: str = "", data: Sequence[Datum] | None = None, **encoding: Any) -> dict[str, Any]:
    """A layer of a chart: a mark for each datum `where` an expression holds; by default for all of the chart's data."""
    parts = {
        "transform": [{"filter": where}] if where else None,
        "data": None if data is None else {"values": data},
        "encoding": encoding or None,
    }
    return {"mark": mark} | {name: part for name, part in parts.items() if part is not None}


def truncation_note(rows: Sized, most: int = MOST_CELLS) -> str:
    """A sentence on cells that the chart does not draw; empty where it draws all."""
    return f" The chart shows the first {most} of {len(rows)} cells." if len(rows) > most else ""


def library(cache: Path | None = None) -> Markup | None:
    """Vega, Vega-Lite and vega-embed as one script, from the package vl-convert-python; None without that package.

    Bundling takes more than a second, so `cache` keeps the script.
    """
    try:
        bundled = version("vl-convert-python")
    except PackageNotFoundError:
        return None
    if cache is None:
        return Markup(_bundle())
    file = cache / f"vega-{bundled}.js"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        kept = read_regular(file, _MAX_SCRIPT).decode()
        if kept.startswith(_LICENCE) and "</script" not in kept.lower():
            return Markup(kept)
    with contextlib.suppress(HarnessError):  # without a writable cache the next report bundles again
        write(file, _bundle())
    return Markup(_bundle())


@functools.cache
def _bundle() -> str:
    import vl_convert

    code: str = _LICENCE + vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # an inline script must not contain </script, not even in a string; JavaScript reads <\/script as the same
    return re.sub("</(?=script)", r"<\\/", code, flags=re.IGNORECASE)
