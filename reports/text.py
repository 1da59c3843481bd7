"""Formats values as text: significant digits, and escaping that makes any string inert in Markdown and CSV."""

import math
import re
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from harness.common.printable import clean

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
N = TypeVar("N", int, float)

MISSING = "\u2013"
TIMES_SIGN = "\u00d7"
GIB = 2.0**30
MIB = 2.0**20
MB = 1e6

_MD_SYNTAX = re.compile(r"([\\`*\[\]|~#$!])|((?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_MD_LEADING = re.compile(r"^(?:([-+=])|(\d+)([.)])(?= |$))")
#: What begins a formula, full-width forms too: in a field, and in its parts where a spreadsheet splits at semicolons.
_FORMULA = re.compile("(^|;)(?=[=+@\uff1d\uff0b\uff0d\uff20-])")
#: Markup of Markdown and HTML, and signs that mean no harm in their place.
_INERT = str.maketrans({"`": "'", "|": "/", "<": "(", ">": ")", "[": "(", "]": ")", "@": "@\u200b"})


def one_line(text: str) -> str:
    """`clean` text with every run of white space collapsed to a single space."""
    return clean(" ".join(text.split()))


def markdown(value: object) -> str:
    """A line of GitHub Markdown that shows `value` literally, in a table cell or at the start of a line."""
    text = one_line(str(value)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _MD_SYNTAX.sub(r"\\\g<0>", text)
    text = _MD_LEADING.sub(lambda m: f"\\{m[1]}" if m[1] else f"{m[2]}\\{m[3]}", text)
    return text.replace("@", "@\u200b")  # a name in a log must not notify a user


def inert(text: str) -> str:
    """A line without markup, for data that another program puts into Markdown or HTML as they are."""
    return one_line(text).translate(_INERT)


def csv_field(value: object) -> object:
    """A CSV field: empty for None, a single line that is no spreadsheet formula for a string, a number unchanged."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _FORMULA.sub(r"\1'", one_line(value))
    return value


def decimals(values: Iterable[float]) -> int:
    """Decimal places for a column: three significant digits for the largest value, two for the smallest.

    The smallest gets three significant digits too where two decimals suffice.
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
    """The numbers of a column divided by `scale`, all with the same decimals; None becomes the missing sign."""
    scaled = [None if v is None else v / scale for v in values]
    places = decimals(v for v in scaled if v is not None)
    return [MISSING if v is None else number(v, places) for v in scaled]


def span(low: float, high: float, separator: str = " to ") -> str:
    """A range, both ends with the same decimals."""
    return separator.join(columns_of([low, high]))


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by key, in order of first appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def flat(value: object, prefix: str = "") -> dict[str, object]:
    """Flattens nested data: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {
        k: v for key, inner in value.items() for k, v in flat(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def listed(values: Iterable[object]) -> str:
    """Values separated by commas; of a mapping its values."""
    return ", ".join(" ".join(map(str, v.values())) if isinstance(v, Mapping) else str(v) for v in values)


def plural(count: int, noun: str, plural_noun: str = "") -> str:
    """`1 cell`, `2 cells`; `plural_noun` for an irregular plural."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural_noun or noun + 's'}"


def finite(value: object) -> float | None:
    """`value` as a float if it is a finite number, else None (charts cannot show NaN)."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    return None


def positive(value: object) -> float | None:
    """`value` as a float between 1e-15 and 1e15, whose ratios are finite; else None."""
    number = finite(value)
    return number if number is not None and 1e-15 < number < 1e15 else None


def quotient(value: float | None, divisor: float | None) -> float | None:
    """`value` / `divisor`; None where one of them is missing, or the divisor 0."""
    return value / divisor if value is not None and divisor else None


def largest(values: Iterable[N | None]) -> N | None:
    """The largest of the values that are not None; None without any."""
    return max((v for v in values if v is not None), default=None)


def median(values: Sequence[float | None]) -> float | None:
    """The median of the values that are not None; None without any."""
    present = [v for v in values if v is not None]
    return statistics.median(present) if present else None
