"""The report in a real browser: what a person does with it, at a telephone's width and in both themes.

Needs Debian's chromium and Playwright. `HARNESS_SCREENSHOTS=FOLDER` keeps what was seen.
"""

import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reports.build import build, build_side_by_side
from reports.history import History
from reports.publish import publish
from reports.vega import library
from tests.records import PROVENANCE, cell, demo, failed, hostile_records, record, repeats, write

pytestmark = pytest.mark.slow

DRAWN = "html[data-charts=drawn]"


class Opened:
    """A page, with all that it said and asked for."""

    def __init__(self, browser: Any, report: Path, width: int = 1200, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda m: self.said.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.said.append(str(e)))
        self.page.on("dialog", lambda d: (self.said.append(f"dialog {d.message}"), d.dismiss()))
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.page.goto(report.as_uri())
        self.page.wait_for_selector(DRAWN, state="attached", timeout=60_000)

    def clean(self) -> None:
        """Nothing went wrong, nothing was fetched, nothing sticks out."""
        assert self.said == []
        assert [url for url in self.asked if not url.startswith("file:")] == [] and len(self.asked) == 1
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    def seen(self, name: str) -> None:
        """Keeps a screenshot, if that is asked for."""
        if folder := os.environ.get("HARNESS_SCREENSHOTS"):
            self.page.screenshot(path=f"{folder}/{name}.png", full_page=True)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path, *_) = build([write(tmp_path_factory.mktemp("run"), demo())])
    return path


@pytest.fixture
def page(browser, report):
    """The page of the report, which must be clean in the end."""
    opened = Opened(browser, report)
    yield opened.page
    opened.clean()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200, 3840])
def test_nothing_goes_wrong_and_nothing_sticks_out(browser, report, width, scheme):
    opened = Opened(browser, report, width, scheme)
    opened.clean()
    charts = opened.page.locator(".plot svg")
    assert charts.count() == opened.page.locator(".plot").count() >= 5
    assert all(charts.nth(i).bounding_box()["width"] <= width for i in range(charts.count()))
    cut = """() => [...document.querySelectorAll(".plot svg text")].filter((text) => {
      const { left, right } = text.getBoundingClientRect();
      return left < 0 || right > innerWidth;
    }).map((text) => text.textContent)"""
    assert opened.page.evaluate(cut) == [], "titles and legends are whole"
    opened.seen(f"report-{width}-{scheme}")
    opened.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_axe_finds_no_fault(browser, report, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    opened = Opened(browser, report, width, scheme)
    opened.page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
    found = axe.run(opened.page).response["violations"]
    assert [(v["id"], v["help"], [n["html"][:200] for n in v["nodes"][:3]]) for v in found] == []
    opened.page.close()


def test_axe_finds_no_fault_in_the_other_pages(browser, tmp_path):
    """Two runs beside each other, and a published history."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    one, two = (write(tmp_path / name, demo()[:-3]) for name in ("one", "two"))
    pages = [build_side_by_side([one, two])]
    history = History(f"sqlite:///{tmp_path}/history.db")
    for day in range(1, 8):
        at = f"2026-11-{day:02}T05:00:00+00:00"
        history.add(
            replace(r, started_at=at, provenance=PROVENANCE | {"git": {"commit": str(day) * 40}}) for r in demo()
        )
    pages += publish(history.series(), tmp_path / "site", library())
    for path in pages:
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(path.as_uri())
        if path.name != "index.html":
            page.wait_for_selector(DRAWN, state="attached", timeout=60_000)
        found = axe.run(page).response["violations"]
        assert [(v["id"], [n["html"][:200] for n in v["nodes"][:3]]) for v in found] == [], path.name
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_paper_has_headings_figures_and_dark_ink(browser, report, scheme):
    opened = Opened(browser, report, 800, scheme)
    page = opened.page
    page.emulate_media(media="print", color_scheme=scheme)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    for heading in ("Cell", "Throughput", "To best rival"):
        assert page.locator("table.sortable th", has_text=heading).first.is_visible(), heading
    assert page.locator(".panel table").first.is_visible(), "charts have their figures"
    assert not page.get_by_role("button", name="theme").is_visible()
    paper, ink = page.evaluate("['backgroundColor', 'color'].map(k => getComputedStyle(document.body)[k])")
    assert (paper, ink) == ("rgb(255, 255, 255)", "rgb(27, 31, 36)")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not page.locator(".panel table").first.is_visible()
    page.close()


def test_a_telephone_shows_throughput_says_that_there_is_more_and_cuts_no_legend(browser, report):
    opened = Opened(browser, report, 360)
    page = opened.page
    summary = page.locator("table.sortable").first
    cell = summary.locator("tbody tr").first.locator("td").first
    box = cell.bounding_box()
    assert "3.10" in cell.inner_text() and box["x"] + box["width"] <= 360
    frame = page.locator(".frame", has=summary)
    arrow = "e => getComputedStyle(e, '::after').opacity"
    assert frame.evaluate(arrow) == "1"
    frame.locator(".scroll").evaluate("e => e.scrollTo(9999, 0)")
    page.wait_for_timeout(200)
    assert frame.evaluate(arrow) == "0"
    for label in page.locator("g.role-legend-label text").all():
        right = label.bounding_box()
        assert right["x"] + right["width"] <= 360
    opened.clean()
    page.close()


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_labels_of_points_do_not_overlap(browser, tmp_path, width):
    rows = [record(cell(f"a-cell-of-a-long-name-{i}", seed=i), speed=2 + (i % 5) / 50) for i in range(12)]
    build([write(tmp_path, rows)])
    page = Opened(browser, tmp_path / "report.html", width).page
    panel = page.locator("figure.panel", has_text="Latency and throughput")
    boxes = [t.bounding_box() for t in panel.locator("g.mark-text.role-mark text").all() if t.text_content()]
    assert len(boxes) == 12
    for a, b in itertools.combinations(boxes, 2):
        apart = (a["y"] + a["height"] <= b["y"] + 1 or b["y"] + b["height"] <= a["y"] + 1
                 or a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"])  # fmt: skip
        assert apart, (a, b)
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    page.close()


def test_a_table_is_sorted_by_its_headings_with_the_keyboard_too(page):
    def names() -> list[str]:
        return page.locator("table.sortable tbody:first-of-type tr th").all_inner_texts()

    first = names()
    heading = page.get_by_role("button", name="Throughput tok/s")
    heading.click()
    heading.click()
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("Throughput")
    assert names() != first and names()[:3] == ["accelerate-bfloat16", "accelerate-float32", "offload-zigzag"]
    assert len(names()) == len(first)
    page.get_by_role("button", name="Cell").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert names() == sorted(first)
    assert page.locator("tbody.apart tr th").first.inner_text().startswith("Reference")  # groups stay together


def test_tooltips_and_what_a_screen_reader_is_told(page):
    mark = page.locator('.plot [aria-label="offload-zigzag, repeat 1: 3 tok/s"]').first
    mark.hover()
    tip = page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    assert "offload-zigzag" in tip.inner_text()


def test_the_axis_can_be_logarithmic(page):
    place = '.plot [aria-label="offload-zigzag: median 3.10 tok/s of 3 launches"]'
    before = page.locator(place).first.bounding_box()
    page.get_by_label("Logarithmic axis").check()
    page.wait_for_timeout(500)
    after = page.locator(place).first.bounding_box()
    assert after["x"] != before["x"]
    page.get_by_label("Logarithmic axis").uncheck()
    page.wait_for_timeout(500)
    assert page.locator(place).first.bounding_box()["x"] == pytest.approx(before["x"], abs=2)


def test_a_click_in_a_legend_puts_one_alone(page):
    panel = page.locator("figure.panel", has_text="Time to first token")

    def opacities() -> set[str]:
        paths = panel.locator("g.mark-line path")
        return set(paths.evaluate_all("paths => paths.map(p => p.getAttribute('opacity'))"))

    before = opacities()
    panel.locator("g.mark-text.role-legend-label text", has_text="offload-zigzag").click()
    page.wait_for_timeout(300)
    assert opacities() != before


def test_the_theme_can_be_switched_charts_included(page):
    def colours() -> list[str]:
        return page.evaluate(
            "[getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.querySelector('.plot svg .role-axis-label text')).fill]"
        )

    light = colours()
    page.get_by_role("button", name="Dark theme").click()
    dark = colours()
    assert all(a != b for a, b in zip(light, dark, strict=True))
    page.get_by_role("button", name="Light theme").click()
    assert colours() == light


def test_a_chart_is_saved_as_it_is_seen_without_a_network(page):
    panel = page.locator("figure.panel", has_text="Latency and throughput")
    saved = {}
    for kind in ("SVG", "PNG"):
        with page.expect_download() as download:
            panel.get_by_role("button", name=f"Save the chart as {kind}").click()
        assert download.value.suggested_filename == f"workload-1-latency-and-throughput.{kind.lower()}"
        saved[kind] = Path(download.value.path()).read_bytes()
    image = saved["SVG"].decode()
    assert image.startswith("<svg") and "Latency and throughput" in image and "offload-zigzag" in image
    assert "var(--" not in image and "rgb(255, 255, 255)" in image
    assert saved["PNG"].startswith(b"\x89PNG") and len(saved["PNG"]) > 10_000


def test_links_to_cells_and_charts_lead_there(browser, report):
    fingerprint = cell("offload-zigzag", "offload").fingerprint()
    for place in (f"cell-1-{fingerprint[:12]}", "workload-1-peak-memory-against-the-limit"):
        page = browser.new_page(viewport={"width": 1200, "height": 500})
        page.goto(f"{report.as_uri()}#{place}")
        page.wait_for_selector(DRAWN, state="attached", timeout=60_000)
        assert page.locator(":target").count() == 1
        assert page.locator(":target").bounding_box()["y"] < 500
        page.close()


def test_figures_of_a_chart_unfold(page):
    panel = page.locator("figure.panel", has_text="Generation throughput").first
    assert not panel.locator("table").is_visible()
    panel.get_by_text("Figures of this chart").click()
    assert panel.locator("table").is_visible()


def test_hostile_words_do_nothing(browser, tmp_path):
    """Images that fail, scripts, handlers: in names of models, suites and cells, in reasons and in logs."""
    attack = "<img src=x onerror=alert(1)></script><script>alert(2)</script><svg onload=alert(3)>"
    spec = cell(attack, suite=attack)
    run = write(tmp_path, [*hostile_records(), *repeats(spec, (1.0, 2.0)), failed(cell("b", seed=8), "error", attack)])
    (run / "logs").mkdir()
    (run / "logs" / "b.log").write_text(attack)
    build([run])
    opened = Opened(browser, run / "report.html")
    opened.clean()
    assert opened.page.locator("img, iframe").count() == 0
    opened.page.locator('.plot [aria-label*="median"]').first.hover()
    opened.page.locator("#vg-tooltip-element.visible").wait_for()
    opened.clean()


def test_five_hundred_records_are_small_and_open_at_once(browser, tmp_path):
    records = [record(cell(f"cell-{i}", seed=i), r, 1 + i + r / 10) for i in range(100) for r in range(5)]
    build([write(tmp_path, records)])
    report = tmp_path / "report.html"
    assert report.stat().st_size < 6e6
    page = browser.new_page()
    began = time.monotonic()
    page.goto(report.as_uri(), wait_until="load")
    took = time.monotonic() - began
    assert page.locator("table.sortable tbody tr").count() == 100
    # under a second on a quiet machine; tests share theirs
    assert took < 5, f"{took:.2f} s to load"
    page.close()
