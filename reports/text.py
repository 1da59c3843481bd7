"""How values become text: significant digits, and escaping that makes any string inert where it is shown."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

MISSING = "\u2013"
TIMES_SIGN = "\u00d7"
GIB = 2.0**30
MIB = 2.0**20
MB = 1e6

# Control characters, bidirectional overrides and lone surrogates: they hide or reorder what a reader sees,
# or cannot be written as UTF-8 at all.
_UNSAFE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MD_SYNTAX = re.compile(r"([\\`*\[\]|~#$!])|((?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_MD_LEADING = re.compile(r"^(?:([-+=])|(\d+)([.)])(?= |$))")


def clean(text: str) -> str:
    """`text` with unprintable and reordering characters replaced by U+FFFD; tabs and newlines stay."""
    return _UNSAFE.sub("\ufffd", text)


def one_line(text: str) -> str:
    """`clean` text with every run of white space collapsed to one blank."""
    return clean(" ".join(text.split()))


def markdown(value: object) -> str:
    """One line of GitHub Markdown that shows `value` literally, in a table cell or at the start of a line."""
    text = one_line(str(value)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _MD_SYNTAX.sub(r"\\\g<0>", text)
    text = _MD_LEADING.sub(lambda m: f"\\{m[1]}" if m[1] else f"{m[2]}\\{m[3]}", text)
    return text.replace("@", "@\u200b")  # a name in a log must not notify anybody


def csv_field(value: object) -> object:
    """A CSV field: None empty, strings on one line and never a spreadsheet formula, numbers as they are."""
    if value is None:
        return ""
    if isinstance(value, str):
        text = one_line(value)
        return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
    return value


def decimals(values: Iterable[float]) -> int:
    """Decimal places for a column: three significant digits for its largest value, two for its smallest.

    Up to the second decimal the smallest gets three as well.
    """
    sizes = [abs(v) for v in values if v]
    if not sizes or all(v == int(v) for v in sizes):
        return 0
    large, small = math.floor(math.log10(max(sizes))), math.floor(math.log10(min(sizes)))
    places = max(2 - large, 1 - small, min(2 - small, 2))
    return min(max(places, 0), 4)


def number(value: float, places: int | None = None) -> str:
    """`value` with thousands separators and `places` decimals, by default three significant digits."""
    if places is None:
        places = decimals([value])
    text = f"{value:,.{places}f}"
    return f"{value:.2g}" if value and float(text.replace(",", "")) == 0 else text


def columns_of(values: Sequence[float | None], scale: float = 1.0) -> list[str]:
    """Numbers of one column, all with the same decimals; None is the missing sign."""
    scaled = [None if v is None else v / scale for v in values]
    places = decimals(v for v in scaled if v is not None)
    return [MISSING if v is None else number(v, places) for v in scaled]


def flat(value: object, prefix: str = "") -> dict[str, object]:
    """Nested data as one level: `{"a": {"b": 1}}` is `{"a.b": 1}`."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {
        k: v for key, inner in value.items() for k, v in flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def plural(count: int, noun: str, many: str = "") -> str:
    """`1 cell`, `2 cells`; `many` where it is more than an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {many or noun + 's'}"


def finite(value: object) -> float | None:
    """`value` as a float if it is a finite number, else None: a chart has no place for NaN."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    return None


def positive(value: object) -> float | None:
    """`value` as a float if it is one that ratios can be made of: above zero, and no further from 1 than any speed."""
    found = finite(value)
    return found if found is not None and 1e-15 < found < 1e15 else None


def median(values: Sequence[float | None]) -> float | None:
    """Median of the values that exist, None where there is none."""
    present = [v for v in values if v is not None]
    return statistics.median(present) if present else None
