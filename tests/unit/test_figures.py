"""Figures that README and the pages quote are those of the committed records, and none is quoted that is not listed."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml

from reports.records import load_records
from reports.stats import ratio_of
from reports.summary import CellSummary, per_token, summary_rows

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
LISTED = yaml.safe_load((RESULTS / "figures.yaml").read_text())
NUMBER = re.compile(r"(?<![\w.,-])-?\d[\d,]*(?:\.\d+)?(?![\w.]*\w)")
#: What a measured figure looks like: a rate, a factor with a fraction, or an interval.
FIGURE = re.compile(
    r"\d[\d.,]* (?:tok/s|token/s|tokens per dollar|[GT]FLOP/s)|\d+\.\d+(?:\*\*)? times|\[\d[\d.]*, \d[\d.]*\]"
)
GLOBS = (
    "README.md", "CHANGELOG.md", "docs/*.md", "docs/guides/*.md", "docs/developer/*.md", "docs/results/index.md",
    "engines/*/*.md",
)  # fmt: skip
PAGES = sorted(str(page.relative_to(ROOT)) for pattern in GLOBS for page in ROOT.glob(pattern))


@dataclass(frozen=True)
class Quoted:
    """A page's text, and where its numbers come from."""

    page: str
    source: str
    text: str
    names: str


QUOTED = [
    Quoted(page, source, text, names or "")
    for page, sources in LISTED.items()
    for source, texts in sources.items()
    for text, names in texts.items()
]


@cache
def rows(run: str) -> dict[str, CellSummary]:
    return {row.name: row for row in summary_rows(load_records([RESULTS / run]))}


def interval(cell: CellSummary, base: str, run: str) -> tuple[float, float, float]:
    """The ratio of a cell to `base`, or to its own rival, and the ends of its interval."""
    ratio = ratio_of(rows(run)[base].throughput, cell.throughput) if base else cell.ratio
    assert ratio is not None
    return ratio.ratio, ratio.low or 0.0, ratio.high or 0.0


def value(name: str, cell: CellSummary, run: str) -> float:
    """A figure of a cell, by its name in figures.yaml."""
    name, _, base = name.partition("/")
    simple = {
        "batch": cell.batch, "tok_s": cell.median, "job_percent": percent(cell.job_fraction),
        "batch_percent": percent(cell.bound_fraction), "peak_mib": mebi(cell.peak_bytes),
        "limit_mib": mebi(cell.limit_bytes), "requests": cell.num_requests,
    }  # fmt: skip
    if name in ("ratio", "low", "high"):
        return interval(cell, base, run)[("ratio", "low", "high").index(name)]
    if name == "loss_percent":
        return 100 * (1 - interval(cell, base, run)[0])
    if name == "tok_s" and base:
        return interval(cell, base, run)[0]
    if name in ("lowest", "highest"):
        return (min if name == "lowest" else max)(cell.throughput)
    found = (per_token(cell.ok_records, "read_bytes") or 0.0) / 1e6 if name == "read_mb" else simple[name]
    assert found is not None, name
    return found / value(name, rows(run)[base], run) if base else found


def percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def mebi(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 2**20


def values(quoted: Quoted) -> list[float | None]:
    """What the numbers of the text are; None for those that are no figures."""
    cell, found = None, list[float | None]()
    for name in quoted.names.split():
        if name in rows(quoted.source):
            cell = rows(quoted.source)[name]
        elif name == "-":
            found.append(None)
        else:
            assert cell is not None, f"{name}: of which cell?"
            found.append(value(name, cell, quoted.source))
    return found


def numbers(text: str) -> list[str]:
    return [number.replace(",", "").lstrip("-") for number in NUMBER.findall(text)]


def is_rounded(quoted: str, exact: float) -> bool:
    """Whether `quoted` is `exact` in as many digits, either way where it lies in the middle."""
    return abs(float(quoted) - exact) <= 0.5001 * 10 ** -len(quoted.partition(".")[2])


@pytest.mark.parametrize("quoted", QUOTED, ids=lambda q: f"{q.page}: {q.text[:50]}")
def test_a_figure_is_its_sources(quoted):
    assert quoted.text in (ROOT / quoted.page).read_text()
    found = numbers(quoted.text)
    if (RESULTS / quoted.source / "records.jsonl").is_file():
        expected = values(quoted)
        assert len(found) == len(expected), (found, expected)
        wrong = [(n, v) for n, v in zip(found, expected, strict=True) if v is not None and not is_rounded(n, v)]
        assert not wrong, f"(quoted, measured): {wrong}"
    elif quoted.source != "published":  # else a paper's, which the page names
        source = (RESULTS / quoted.source).resolve()
        assert source.is_file()
        if source.suffix != ".py":  # else a test, of what a command prints
            stated = quoted.names.split() or found
            there = set(numbers(source.read_text()))
            assert [n for n in stated if n != "-" and n not in there] == []
            assert all(s == "-" or is_rounded(n, float(s)) for n, s in zip(found, stated, strict=True))


@pytest.mark.parametrize("page", PAGES)
def test_every_measured_figure_of_a_page_is_listed(page):
    text = (ROOT / page).read_text()
    for quoted in QUOTED:
        if quoted.page == page:
            text = text.replace(quoted.text, "")
    assert FIGURE.findall(text) == []


def test_a_wrong_figure_would_be_seen():
    right = Quoted("README.md", "quickstart-2026-11-25-2", "105.5", "offload-sweep tok_s")
    assert is_rounded("105.5", values(right)[0])
    assert not is_rounded("105.6", values(right)[0])
    assert is_rounded("2.5", 2.45)
    assert not is_rounded("2.5", 2.4)
    assert FIGURE.findall("we reach 31.4 tok/s, 1.9 times theirs") == ["31.4 tok/s", "1.9 times"]
