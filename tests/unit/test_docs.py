"""README and the pages: links lead somewhere, named files exist, suites in them are valid, every key is described."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from harness.api import HardwareLimits, HardwareRequirements, ModelSpec, OffloadPolicy, WorkloadSpec
from harness.suite.config import CELL_KEYS, SUITE_KEYS, load_suite

ROOT = Path(__file__).parents[2]
FOLDERS = ("*.md", "docs/**/*.md", "examples/*.md", "engines/**/*.md")
PAGES = sorted(page for pattern in FOLDERS for page in ROOT.glob(pattern))
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
#: Files of the source tree that a page names in code font.
NAMED = re.compile(
    r"`((?:\.ci|ci|docs|engines|examples|harness|reports|suites|tests)/[\w./-]+\.(?:py|yaml|yml|sh|json|ipynb))`"
)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page):
    text = FENCED.sub("", page.read_text())
    for image, target in re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if target.startswith(("https://", "http://")):
            continue
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target}: no such file"
        generated = anchor.startswith("harness.api.")  # from docstrings: the strict build of the site checks it
        assert not anchor or image or generated or anchor in anchors(linked), f"{target}: no such heading"
    for name in NAMED.findall(text):
        assert (ROOT / name).exists(), f"{name}: no such file"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", ["README.md", "docs/guides/suites.md"])
def test_suites_in_pages_are_valid(name, tmp_path):
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        (tmp_path / "suite.yaml").write_text(block)
        assert load_suite(tmp_path / "suite.yaml").cells


def test_navigation_names_every_page():
    """The site's strict build checks the same; this needs no MkDocs."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    named = set(re.findall(r"[\w/.-]+\.md", str(nav)))
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("**/*.md")}
    assert {page for page in there if not re.match(r"results/.+/", page)} <= named


PAGE = ROOT / "docs" / "reference" / "suites.md"


def section(title: str) -> set[str]:
    """The keys that stand in the first column of a section's table."""
    _, _, rest = PAGE.read_text().partition(f"## {title}\n")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", rest.partition("\n## ")[0], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize(
    ("title", "kind"), [("A model", ModelSpec), ("A workload", WorkloadSpec), ("A policy", OffloadPolicy)]
)
def test_every_field_and_no_other(title, kind):
    assert section(title) == written(kind)


def written(kind):
    """Its fields as a suite has them: values of durations bring their units."""
    keys = {"duration_s": "duration", "think_s": "think_time", "link_delay_s": "link_delay"}
    return {keys.get(field.name, field.name) for field in fields(kind)}


def test_every_key_of_a_cell_and_of_a_suite_and_every_limit():
    assert section("A cell") == set(CELL_KEYS)
    assert section("The suite") | section("A cell") == set(SUITE_KEYS) | {"limits"}
    text = PAGE.read_text()
    assert all(f"`{name}`" in text for kind in (HardwareLimits, HardwareRequirements) for name in written(kind))
