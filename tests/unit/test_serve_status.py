"""What a server says of itself at / and /status."""

import http.client
import json
from dataclasses import replace

from tests.serving import SETTINGS, ask, serving, until
from tests.unit.test_serve_batches import begin, client_of, line


def status(port, **headers):
    return ask(port, "/status", method="GET", **headers)[1]


def test_counts_and_what_is_pending(tmp_path):
    with serving(folder=tmp_path, sleep_s=0.01) as (port, loop):
        ask(port, body={"prompt": "abc", "max_tokens": 5})
        first = status(port)
        assert (first["model"], first["state"], first["reason"]) == ("fake", "serving", "")
        assert (first["generated_tokens"], first["passes"], first["rows"]) == (5, 5, 5)
        assert (first["pending"], first["requests"], first["batches"]) == (0, [], [])
        connection = http.client.HTTPConnection("127.0.0.1", port)
        asked = {"prompt": "abcd", "max_tokens": 4000, "n": 2, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(asked))
        until(lambda: status(port)["generated_tokens"] > 9)
        batch = begin(client_of(port), [line(i, max_tokens=2000) for i in range(9)])
        until(lambda: loop.pending == 6)  # four lines of a batch at a time
        now = status(port)
        assert now["time_s"] > first["time_s"] and now["pending"] == len(now["requests"]) == 6
        mine, other = now["requests"][:2]
        assert (mine["prompt_tokens"], mine["max_tokens"]) == (4, 4000)
        assert 0 < mine["tokens"] <= other["tokens"] + 1 and 0 < mine["age_s"] < 30
        assert now["batches"] == [{"id": batch.id, "status": "in_progress", "total": 9, "completed": 0, "failed": 0}]
        connection.close()


def test_no_more_than_a_hundred_requests_are_listed():
    with serving(replace(SETTINGS, max_pending=200), sleep_s=0.05) as (port, loop):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        asked = {"prompt": ["a", "b"], "max_tokens": 4000, "n": 60, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(asked))
        until(lambda: loop.pending == 120)
        now = status(port)
        assert (now["pending"], len(now["requests"])) == (120, 100)
        connection.close()


def test_a_server_that_ends_and_one_that_broke_say_so():
    with serving(sleep_s=0.01) as (port, loop):
        loop.close(drain=True)
        assert status(port)["state"] == "draining"
        loop.failure = "the engine has failed"
        assert (status(port)["state"], status(port)["reason"]) == ("failed", "the engine has failed")


def test_the_page_tells_nothing_and_needs_no_key_and_its_figures_do():
    with serving(replace(SETTINGS, api_key="secret")) as (port, _):
        for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
            response, text = ask(port, path, method="GET")
            assert response.status == 200 and response.headers["content-type"].startswith(kind)
            assert "default-src 'none'" in response.headers["content-security-policy"]
            assert text
        assert ask(port, "/status", method="GET")[0].status == 401
        assert status(port, authorization="Bearer secret")["model"] == "fake"
