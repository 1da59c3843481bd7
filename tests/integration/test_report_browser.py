"""The report in a real browser: what a person does with it, at a telephone's width and in both themes.

Needs Debian's chromium and Playwright. `HARNESS_SCREENSHOTS=FOLDER` keeps what was seen.
"""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reports.build import build
from tests.records import cell, demo, failed, hostile_records, record, repeats, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DRAWN = "html[data-charts=drawn]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no Chromium here: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


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
    opened.seen(f"report-{width}-{scheme}")
    opened.page.close()


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
