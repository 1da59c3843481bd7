"""The server's page in a real browser. Needs Debian's chromium and Playwright; `HARNESS_SCREENSHOTS=FOLDER` keeps what
was seen."""

import http.client
import json
import os
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.serving import SETTINGS, ask, serving, until
from tests.unit.test_serve_batches import begin, client_of, line

pytestmark = pytest.mark.slow


@contextmanager
def opened(browser, port, width=1200, scheme="light"):
    """The page, which says nothing on the console and fetches nothing from elsewhere."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said, asked = [], []
    page.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: said.append(str(e)))
    page.on("request", lambda r: asked.append(r.url))
    page.goto(f"http://127.0.0.1:{port}/")
    yield page
    page.close()
    assert [text for text in said if "401" not in text] == []
    assert all(url.startswith(f"http://127.0.0.1:{port}/") for url in asked)


def text(page, name):
    return page.locator(f"#{name}").inner_text()


def wait(page, condition):
    """From outside: the page's own policy forbids code from texts, with which Playwright would look."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        page.wait_for_timeout(50)


@contextmanager
def streaming(port):
    """A request under way, whose client goes away in the end."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    connection.getresponse().read(10)
    yield
    connection.close()


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (768, "dark"), (1200, "light"), (1200, "dark")])
def test_what_runs_is_seen(browser, tmp_path, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with serving(folder=tmp_path, sleep_s=0.02) as (port, loop):
        batch = begin(client_of(port), [line(i, max_tokens=2000) for i in range(3)])
        until(lambda: loop.pending == 3)
        with streaming(port), opened(browser, port, width, scheme) as page:
            wait(page, lambda: text(page, "rate") not in ("", "\u2013", "0.0"))
            assert page.locator("#model").inner_text() == "fake"
            assert page.locator("#state").inner_text().startswith("serving")
            assert page.locator("#pending tbody tr").count() == 4
            assert page.locator("#batch-rows").inner_text().split()[0] == batch.id
            assert len(page.locator("#line").get_attribute("points").split()) >= 1
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            found = axe.run(page).response["violations"]
            assert [(v["id"], [n["html"][:200] for n in v["nodes"][:3]]) for v in found] == []
            if folder := os.environ.get("HARNESS_SCREENSHOTS"):
                page.wait_for_timeout(5000)
                page.screenshot(path=f"{folder}/serve-{width}-{scheme}.png", full_page=True)


def test_a_key_is_asked_for_and_kept(browser):
    with serving(replace(SETTINGS, api_key="secret")) as (port, _), opened(browser, port) as page:
        page.wait_for_selector("#key")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        wait(page, lambda: text(page, "state") == "wrong key")
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.wait_for_selector("#rate")
        assert page.locator("#ask").is_hidden()
        page.reload()
        page.wait_for_selector("#rate")


def test_a_server_that_breaks_and_one_that_is_gone_are_told(browser):
    with serving() as (port, loop), opened(browser, port) as page:
        page.wait_for_selector("#rate")
        loop.failure = "the engine has failed (error): <b>no</b> memory"
        wait(page, lambda: text(page, "state").startswith("failed: "))
        assert "<b>no</b> memory" in page.locator("#state").inner_text()


def test_a_name_that_is_markup_is_text(browser):
    with serving() as (port, _), opened(browser, port) as page:
        page.wait_for_selector("#rate")
        page.route("**/status", lambda route: route.fulfill(json={
            **ask(port, "/status", method="GET")[1], "model": "<img src=x onerror=alert(1)>"}))  # fmt: skip
        wait(page, lambda: text(page, "model").startswith("<img"))
        assert page.locator("img").count() == 0
