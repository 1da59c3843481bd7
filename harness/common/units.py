"""Parses sizes and durations with units."""

import math
import re
from collections.abc import Mapping
from decimal import Decimal

from harness.api import HarnessError

MAX_SIZE = 1 << 50

_SIZES = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
#: Of powers of a thousand.
_PREFIXES = {-3: "n", -2: "u", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P"}
#: Of a network, in bits per second.
_RATES = {f"{prefix}bit": 1000**power for power, prefix in enumerate(("", "k", "M", "G"))}
_DURATIONS: Mapping[str, int | Decimal] = {"ms": Decimal("0.001"), "s": 1, "min": 60, "h": 3600, "d": 86400}
_QUANTITY = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,16})?) ?([A-Za-z]{1,9})")


def parse_size(text: str) -> int:
    """Bytes of a size such as `16GiB`, `208GB` or `1.5 MiB`. Raises HarnessError for other text and above 1 PiB."""
    size = int(_quantity(text, _SIZES, "a size such as 16GiB, 208GB or 600MiB"))
    if size > MAX_SIZE:
        raise HarnessError(f"{text!r} is more than 1 PiB")
    return size


def parse_duration(text: str) -> float:
    """Seconds of a duration such as `90s`, `20min` or `1.5h`. Raises HarnessError for other text."""
    return float(_quantity(text, _DURATIONS, "a duration such as 90s, 20min or 1h"))


def parse_rate(text: str) -> int:
    """Bits per second of a network's rate such as `100Mbit` or `1Gbit`. Raises HarnessError for other text."""
    return int(_quantity(text, _RATES, "a rate such as 100Mbit or 1Gbit (per second)"))


def rounded(value: float) -> str:
    """A figure for people: three digits, or whole numbers from 100 on, such as `66.7` and `18,668`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def with_unit(value: float, unit: str) -> str:
    """A figure in three digits with a decimal prefix before its unit, such as `18.2 GB/s` or `41.3 us`; one without a
    unit as it is."""
    if not unit or not value:
        return f"{value:.3g} {unit}".strip()
    power = min(max(math.floor(math.log10(abs(value) * (1 + 5e-4)) / 3), min(_PREFIXES)), max(_PREFIXES))
    return f"{value / 1000**power:.3g} {_PREFIXES[power]}{unit}"


def _quantity(text: str, units: Mapping[str, int | Decimal], expected: str) -> Decimal:
    got = repr(text if len(text) <= 64 else f"{text[:64]}...")
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise HarnessError(f"expected {expected}, got {got}")
    factor = {name.lower(): factor for name, factor in units.items()}.get(match[2].lower())
    if factor is None:
        raise HarnessError(f"expected {expected}, got {got}; the units are {', '.join(units)}")
    return Decimal(match[1]) * factor
