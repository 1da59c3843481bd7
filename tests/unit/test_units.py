"""Sizes and durations as users write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.api import HarnessError
from harness.cli import cache, ls, plan
from harness.suite.config import parse_duration, parse_size


class TestUnits:
    @given(st.integers(0, 1023), st.sampled_from(["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
    def test_sizes_round_trip(self, number, unit):
        base = 1024 if "i" in unit else 1000
        size = number * base ** ("BKMGT".index(unit[0].upper()) if unit != "B" else 0)
        assert parse_size(f"{number}{unit}") == parse_size(f"{number} {unit.lower()}") == size
        assert parse_size(f"{size}B") == size

    def test_fractions_are_exact_up_to_the_largest_size(self):
        assert parse_size("1.5GiB") == 3 << 29
        assert parse_size("1.1GB") == 1_100_000_000
        assert parse_size("1024TiB") == 1 << 50
        with pytest.raises(HarnessError, match="more than 1 PiB"):
            parse_size("1024.1TiB")

    @pytest.mark.parametrize(
        "text",
        ["", "16", "16G", "-1GiB", "1e3GB", "GiB", "1 GiB ", "1GiB\n", "\u0661GiB", "0x1B", "1PiB", "inf B", "9" * 99],
    )
    def test_wrong_sizes(self, text):
        with pytest.raises(HarnessError, match="expected a size such as"):
            parse_size(text)

    @pytest.mark.parametrize(
        ("text", "seconds"),
        [("90s", 90), ("20min", 1200), ("1h", 3600), ("1.5 h", 5400), ("250ms", 0.25), ("2d", 172800)],
    )
    def test_durations(self, text, seconds):
        assert parse_duration(text) == seconds

    @pytest.mark.parametrize("text", ["", "90", "1m", "-1s", "1h30min", "soon", "1:30"])
    def test_wrong_durations(self, text):
        with pytest.raises(HarnessError, match="expected a duration such as"):
            parse_duration(text)


@pytest.mark.parametrize(
    ("shown", "value", "text"),
    [
        (cache._size, 1023, "1023 B"),
        (cache._size, 1024, "1.0 KiB"),
        (cache._size, 1 << 20, "1.0 MiB"),
        (cache._size, 3 << 29, "1.5 GiB"),
        (plan._duration, 119.0, "119 s"),
        (plan._duration, 120.0, "2 min"),
        (plan._duration, 7200.0, "2 h"),
        (ls._duration, None, "not measured"),
        (ls._duration, 89.0, "89 min"),
        (ls._duration, 90.0, "1.5 h"),
    ],
)
def test_sizes_and_durations_change_their_unit_where_it_reads_better(shown, value, text):
    assert shown(value) == text
