"""docs/reference/suites.md names every key that a suite may have."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from harness.api import HardwareLimits, HardwareRequirements, ModelSpec, OffloadPolicy, WorkloadSpec
from harness.suite.config import CELL_KEYS, SUITE_KEYS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "suites.md"


def section(title: str) -> set[str]:
    """The keys that stand in the first column of a section's table."""
    _, _, rest = PAGE.read_text().partition(f"## {title}\n")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", rest.partition("\n## ")[0], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize(
    ("title", "kind"), [("A model", ModelSpec), ("A workload", WorkloadSpec), ("A policy", OffloadPolicy)]
)
def test_every_field_and_no_other(title, kind):
    assert section(title) == {field.name for field in fields(kind)}


def test_every_key_of_a_cell_and_of_a_suite():
    assert section("A cell") == set(CELL_KEYS)
    assert section("The suite") | section("A cell") == set(SUITE_KEYS) | {"limits"}


def test_every_limit():
    text = PAGE.read_text()
    for kind in (HardwareLimits, HardwareRequirements):
        assert all(f"`{field.name}`" in text for field in fields(kind))
