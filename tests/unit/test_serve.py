"""The server on the fake engine, asked by OpenAI's own client and by raw HTTP."""

import asyncio
import contextlib
import http.client
import json
import resource
import socket
import threading
import time
from dataclasses import replace
from unittest import mock

import jsonschema
import openai
import pytest
import uvicorn

from engines.adapters.fake import MODEL, SHAPE, FakeText
from harness.api import HarnessError
from harness.serve import bodies
from harness.serve.app import make_app
from harness.serve.connections import connection_class, reserve_descriptors
from harness.serve.engine_loop import EngineLoop
from harness.serve.served import Served
from harness.serve.settings import MAX_BODY
from tests.serving import SETTINGS, alone, ask, loaded, serving, until


@pytest.fixture(scope="module")
def port():
    with serving() as (number, _):
        yield number


@pytest.fixture
def client(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0)


def test_a_completion_is_the_engine_s_whole_or_in_pieces(client):
    whole = client.completions.create(model="fake", prompt="hi", max_tokens=6, seed=3)
    assert whole.choices[0].text == alone(b"hi", 6, seed=3) and whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (2, 6, 8)
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    stream = client.completions.create(
        model="fake", prompt="hi", max_tokens=6, seed=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text and len(pieces) == 7
    assert [piece.finish_reason for piece in pieces] == [None] * 6 + ["length"]
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert len({chunk.id for chunk in chunks}) == 1
    stream = client.completions.create(
        model="fake", prompt="hi", max_tokens=6, seed=3, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    assert [chunk.usage.completion_tokens for chunk in stream] == [1, 2, 3, 4, 5, 6, 6, 6]


def test_what_a_step_gives_a_stream_leaves_in_one_piece(port):
    body = json.dumps({"prompt": "hi", "max_tokens": 5, "ignore_eos": True, "n": 2, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(body)}"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        rest = b"".join(iter(lambda: connection.recv(1 << 16), b"")).partition(b"\r\n\r\n")[2]
    pieces = []
    while size := int(rest.partition(b"\r\n")[0], 16):
        rest = rest.partition(b"\r\n")[2]
        pieces.append(rest[:size])
        rest = rest[size + 2 :]
    assert b"".join(pieces).count(b"data: ") == 2 * 5 + 2 + 1
    assert len(pieces) <= 6, "the second choice may begin a step later"
    assert pieces[-1].endswith(b"data: [DONE]\n\n")


def test_a_chat_is_rendered_and_streamed(client):
    messages = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(model="fake", messages=messages, max_completion_tokens=4, seed=1)
    answer = whole.choices[0].message
    assert (answer.role, answer.content) == ("assistant", alone(b"user: hi\n", 4, seed=1))
    chunks = list(
        client.chat.completions.create(model="fake", messages=messages, max_completion_tokens=4, seed=1, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.content


def test_samples_and_several_prompts_are_choices_in_order(client):
    def texts(prompt, **settings):
        answer = client.completions.create(model="fake", prompt=prompt, max_tokens=3, seed=5, **settings)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices], answer.usage.prompt_tokens

    two, tokens = texts("a", n=2)
    assert two[0] == texts("a")[0][0] != two[1] and tokens == 1
    both, tokens = texts(["a", "bc"], n=2)
    assert both == two + texts("bc", n=2)[0] and tokens == 3
    assert texts([[97], [98, 99]])[0] == [both[0], both[2]]
    stream = client.completions.create(model="fake", prompt=["a", "bc"], max_tokens=3, seed=5, n=2, stream=True)
    pieces = [""] * 4
    for chunk in stream:
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == both


def test_a_prompt_is_echoed_with_its_scores(client):
    """As lm-eval asks: several prompts of token ids, the prompt's log-probabilities before the new token's."""
    prompts = [list(b"hello"), list(b"me too")]
    answer = client.completions.create(model="fake", prompt=prompts, max_tokens=1, logprobs=1, echo=True, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.text == bytes(prompt).decode() + alone(prompt, 1, seed=1)
        scored = choice.logprobs
        assert scored.tokens[: len(prompt)] == [chr(token) for token in prompt]
        assert len(scored.tokens) == len(scored.token_logprobs) == len(scored.top_logprobs) == len(prompt) + 1
        assert scored.token_logprobs[0] is None and scored.top_logprobs[0] is None
        [score] = loaded().score([(prompt[:2], prompt[2:])])
        assert sum(scored.token_logprobs[2:-1]) == pytest.approx(score.logprob)
        assert all(list(top.values()) == [value] for top, value in zip(
            scored.top_logprobs[1:], scored.token_logprobs[1:], strict=True))  # fmt: skip


def test_a_prompt_is_echoed_without_scores_whole_and_in_pieces(client):
    settings = {"model": "fake", "prompt": ["ab", "cde"], "max_tokens": 3, "seed": 5, "n": 2}
    plain, echoed = (client.completions.create(**settings, echo=echo) for echo in (False, True))
    texts = [choice.text for choice in echoed.choices]
    assert texts == [p + c.text for p, c in zip(("ab", "ab", "cde", "cde"), plain.choices, strict=True)]
    assert echoed.choices[0].logprobs is None and echoed.usage == plain.usage
    pieces = [""] * 4
    for chunk in client.completions.create(**settings, echo=True, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == texts


def test_requests_without_a_seed_differ(client):
    both = [client.completions.create(model="fake", prompt="hi", max_tokens=8).choices[0].text for _ in range(2)]
    assert both[0] != both[1]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "the request is not JSON"),
        (b"[]", 400, "expected a JSON object"),
        (b'{"prompt": "\xff"}', 400, "is not UTF-8"),
        (b'{"prompt": "\\ud800"}', 400, "half of a surrogate pair"),
        ({"prompt": 3}, 400, "prompt: expected a string or a list of token ids"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": []}, 400, "the prompt is empty"),
        ({"prompt": [1 << 40]}, 400, str(1 << 40)),
        ({}, 400, "prompt is missing"),
        ({"prompt": "a", "max_tokns": 2}, 400, "did you mean 'max_tokens'"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens is 0"),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ({"prompt": "a", "echo": 1}, 400, "echo"),
        ({"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, 400, "only without stream"),
        ({"prompt": "a", "tools": []}, 400, "tools: functions are not called; ask for an answer by response_format"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, 400, "json_schema goes with type json_schema"),
        ({"prompt": "a", "response_format": {"type": "json_object"}, "ignore_eos": True}, 400, "without ignore_eos"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, 400, "fake does not support json_schema"),
        ({"prompt": "a", "stream": 1.5}, 400, "stream: expected true or false"),
        ({"prompt": "a", "stream_options": {}}, 400, "only for a stream"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, 400, "include_usage"),
        ({"prompt": "a", "model": "other"}, 404, "this server has 'fake'"),
        ({"prompt": "a", "max_tokens": 5000}, 400, "4096"),
        ({"prompt": "a", "n": 1000}, 400, "n: "),
        (b"[" * 100_000, 400, "the request"),
    ],
)
def test_a_bad_request_is_one_clear_error(port, body, status, message):
    response, answer = ask(port, body=body)
    assert response.status == status and set(answer) == {"error"}
    assert message in answer["error"]["message"] and "\n" not in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["code"]


def test_what_is_not_there_and_what_is_too_large(port):
    assert ask(port, "/v1/nothing", {})[0].status == 404
    assert ask(port, "/v1/completions", method="GET")[0].status == 405
    assert ask(port, "/v1/models/other", method="GET")[0].status == 404
    response, answer = ask(port, body=b" " * (MAX_BODY + 1))
    assert response.status == 413 and "16 MiB" in answer["error"]["message"]


def test_models_tokens_health_and_the_request_s_name(port, client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "harness"
    assert ask(port, "/tokenize", {"prompt": "hi"})[1] == {"tokens": [104, 105], "count": 2, "max_model_len": 4096}
    assert ask(port, "/tokenize", {"prompt": 1})[0].status == 400
    assert ask(port, "/tokenize", {"prompt": "\ud800"})[0].status == 400
    for path in ("/health", "/ready"):
        assert ask(port, path, method="GET")[0].status == 200
    response, _ = ask(port, "/health", method="GET", **{"x-request-id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    response, _ = ask(port, "/health", method="GET", **{"x-request-id": "x" * 200})
    assert response.headers["x-request-id"] not in ("x" * 200, "")


def test_pages_of_other_sites_may_not_ask(port):
    asked = {"prompt": "a", "max_tokens": 1}
    response, answer = ask(port, body=asked, origin="http://evil.example")
    assert response.status == 403 and "pages of other sites may not ask" in answer["error"]["message"]
    assert ask(port, "/v1/models", method="GET", host="evil.example")[0].status == 403
    assert ask(port, body=asked, origin=f"http://127.0.0.1:{port}")[0].status == 200
    assert ask(port, "/health", method="GET", origin="http://evil.example")[0].status == 200
    with serving(replace(SETTINGS, api_key="secret")) as (guarded, _):
        key = {"authorization": "Bearer secret"}
        assert ask(guarded, body=asked, origin="http://chat.example", **key)[0].status == 200


def test_a_key_is_asked_for_but_not_by_health_checks():
    with serving(replace(SETTINGS, api_key="secret")) as (port, _):
        asked = {"prompt": "a", "max_tokens": 1}
        assert ask(port, body=asked)[0].status == 401
        assert ask(port, body=asked, authorization="Bearer wrong")[0].status == 401
        assert ask(port, body=asked, authorization="Bearer secret")[0].status == 200
        assert ask(port, "/v1/models", method="GET")[0].status == 401
        assert ask(port, "/health", method="GET")[0].status == 200
        assert ask(port, "/metrics", method="GET")[0].status == 200


def test_metrics_count_requests_tokens_and_times():
    with serving() as (port, _):
        ask(port, body={"prompt": "abc", "max_tokens": 5})
        ask(port, body={"prompt": ""})
        lines = ask(port, "/metrics", method="GET")[1].decode().splitlines()
    assert 'harness_requests_total{outcome="ok"} 1.0' in lines
    assert 'harness_requests_total{outcome="refused"} 1.0' in lines
    assert 'harness_tokens_total{kind="prompt"} 3.0' in lines and 'harness_tokens_total{kind="generated"} 5.0' in lines
    assert "harness_ttft_seconds_count 1.0" in lines and "harness_tpot_seconds_count 1.0" in lines
    assert "harness_passes_total 5.0" in lines and "harness_pass_rows_total 5.0" in lines
    seconds = next(line for line in lines if line.startswith("harness_pass_seconds_total ")).split()[1]
    assert f'harness_task_seconds_total{{task="products"}} {seconds}' in lines


LONG = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place(stream):
    with serving(sleep_s=0.005) as (port, loop):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/completions", json.dumps({**LONG, "stream": stream}))
        until(lambda: loop.pending == 1)
        if stream:
            connection.getresponse().read(10)
        connection.sock.close()
        connection.close()
        until(lambda: loop.pending == 0)
        assert ask(port, body={"prompt": "a", "max_tokens": 1})[0].status == 200


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
def test_a_client_that_leaves_before_its_stream_begins_leaves_nothing_running(spec_version):
    """ASGI servers tell of it in either of two ways: the next message says so, or nothing can be sent."""
    body = json.dumps({**LONG, "stream": True}).encode()
    messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]

    async def receive():
        return messages.pop(0) if messages else await asyncio.Event().wait()

    async def send(message):
        if spec_version == "2.4":
            raise OSError("the client has gone")

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": spec_version}, "method": "POST", "query_string": b"",
        "path": "/v1/completions", "headers": [(b"host", b"localhost")], "state": {"connection": mock.Mock()},
    }  # fmt: skip
    engine = loaded(sleep_s=0.05)
    with contextlib.closing(EngineLoop(engine, 8)) as loop:
        app = make_app(Served(engine, loop, "fake", SHAPE, FakeText(MODEL), SHAPE.max_context, SETTINGS))
        asyncio.run(app(scope, receive, send))
        until(lambda: loop.pending == 0)
        assert loop.generated_tokens < 1000


def test_too_many_requests_are_sent_away_and_a_silent_stream_shows_that_it_lives():
    with serving(replace(SETTINGS, max_pending=2), sleep_s=0.3) as (port, loop):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/completions", json.dumps({**LONG, "n": 2, "stream": True}))
        response = connection.getresponse()
        assert response.readline() == b": keep-alive\n"
        busy, answer = ask(port, body={"prompt": "a"})
        assert busy.status == 429 and int(busy.headers["retry-after"]) > 0
        assert "2 requests" in answer["error"]["message"]
        response.close()
        connection.close()
        until(lambda: loop.pending == 0)


def test_a_stream_that_is_never_silent_has_no_comments():
    body = {"prompt": "hi", "max_tokens": 5, "ignore_eos": True, "stream": True}
    with serving(replace(SETTINGS, keep_alive_s=60.0)) as (port, _):
        lines = ask(port, body=body)[1].decode().split("\n\n")
    assert len(lines) >= 3 and all(line.startswith("data: ") for line in lines[:-1])


def test_too_many_clients_are_told_and_the_others_served():
    with serving(replace(SETTINGS, max_connections=3)) as (port, _), contextlib.ExitStack() as connected:
        held = [connected.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(2)]
        until(lambda: ask(port, "/health", method="GET")[0].status == 200)
        held.append(connected.enter_context(socket.create_connection(("127.0.0.1", port))))
        time.sleep(0.05)
        response, answer = ask(port, body={"prompt": "a"})
        assert response.status == 503 and response.headers["retry-after"] and "3 clients" in answer["error"]["message"]
        with socket.create_connection(("127.0.0.1", port), timeout=30) as slow:  # it sends its request when refused
            for part in (b"POST /v1/completions HTTP/1.1\r\n", b"host: 127.0.0.1\r\ncontent-length: 9\r\n\r\n"):
                time.sleep(0.1)
                slow.sendall(part)
            assert slow.recv(4096).startswith(b"HTTP/1.1 503 ")
        held[0].close()
        until(lambda: ask(port, "/health", method="GET")[0].status == 200)


def test_a_client_that_asks_nothing_is_cut_off_and_one_that_asked_is_not():
    with serving(replace(SETTINGS, patience_s=0.3), sleep_s=0.01) as (port, _):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as silent:
            assert silent.recv(1) == b""
        assert ask(port, body={"prompt": "a", "max_tokens": 60, "ignore_eos": True})[0].status == 200


def test_a_client_that_begins_another_request_and_does_not_end_it_is_cut_off():
    """As one that never asked: it would hold one of the places for ever."""
    with (
        serving(replace(SETTINGS, patience_s=0.5)) as (port, _),
        socket.create_connection(("127.0.0.1", port), timeout=30) as slow,
    ):
        slow.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):
            answer += slow.recv(4096)
        slow.sendall(b"GET /health HTTP/1.1\r\nho")
        began = time.monotonic()
        assert slow.recv(4096) == b"" and time.monotonic() - began > 0.4


def test_more_answers_than_a_server_ever_holds_are_refused_for_good():
    """At once, whatever their prompts are; 429 would have a client ask again and again."""
    with serving(replace(SETTINGS, max_pending=4)) as (port, _):
        for body in ({"prompt": ["a"] * 5}, {"prompt": "a", "n": 5}, {"prompt": ["a", "b"], "n": 3}):
            response, answer = ask(port, body=body)
            assert response.status == 400 and "holds at most 4 at a time" in answer["error"]["message"], body
        response, answer = ask(port, body={"prompt": ["a", [98]], "n": 2, "max_tokens": 2, "seed": 5})
        assert response.status == 200
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts[::2] == [alone(b"a", 2, seed=5), alone(b"b", 2, seed=5)]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [(["a", {}], "prompt"), (["a", ["b"]], "list of token ids"), ([["x"], "a"], "list of token ids"), (["a", []], "")],
)
def test_each_of_several_prompts_is_checked(port, prompts, words):
    response, answer = ask(port, body={"prompt": prompts, "max_tokens": 2})
    assert response.status == 400 and words in answer["error"]["message"], answer


def test_prompts_without_a_seed_are_drawn_apart(port):
    answer = ask(port, body={"prompt": ["a", "a", "a"], "max_tokens": 12, "ignore_eos": True})[1]
    assert len({choice["text"] for choice in answer["choices"]}) == 3


def test_what_nobody_foresaw_has_the_form_of_an_error():
    with mock.patch("harness.serve.app.Answer", side_effect=ZeroDivisionError), serving() as (port, _):
        response, answer = ask(port, body={"prompt": "a"})
        assert response.status == 500 and answer["error"]["code"] == "internal_error"
        assert "ZeroDivisionError" in answer["error"]["message"]
        assert b'outcome="failed"' in ask(port, "/metrics", method="GET")[1]


@pytest.mark.parametrize("reads_on", [True, False])
def test_a_client_that_reads_nothing_is_cut_off(reads_on):
    """As a transport tells whose buffer is full."""

    async def aborted():
        config, transport = uvicorn.Config(None), mock.Mock()
        connection = connection_class(9, 0.05)(config, uvicorn.server.ServerState(), {})
        connection.connection_made(transport)
        connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        connection.pause_writing()
        if reads_on:
            connection.resume_writing()
        await asyncio.sleep(0.2)
        return transport.abort.called

    assert asyncio.run(aborted()) is not reads_on


def test_a_body_that_trickles_is_refused(monkeypatch):
    monkeypatch.setattr(bodies, "_GRACE_S", 0.2)
    with serving() as (port, _), socket.create_connection(("127.0.0.1", port), timeout=30) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000\r\n\r\n{")
        answer = b"".join(iter(lambda: slow.recv(4096), b""))  # until the server hangs up
        assert b" 408 " in answer and b"too slowly: 1 bytes so far" in answer


def test_a_client_that_leaves_amid_its_body_leaves_no_trace(caplog):
    with serving() as (port, _):
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000\r\n\r\n{")
        until(lambda: b'outcome="cancelled"} 1.0' in ask(port, "/metrics", method="GET")[1])
    assert not [record for record in caplog.records if record.exc_info]


def test_as_many_connections_as_files_may_be_open():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        reserve_descriptors(1000)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 1000
        with pytest.raises(HarnessError, match=r"--max-connections \d+: this process may open \d+ files; raise that"):
            reserve_descriptors(hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_engine_that_breaks_fails_its_requests_and_the_health_check():
    with serving(max_batch=1) as (port, loop):
        response, answer = ask(port, body={"prompt": "a"})
        assert response.status == 503 and "the engine has failed (oom_host)" in answer["error"]["message"]
        assert ask(port, "/health", method="GET")[0].status == 503
        assert ask(port, body={"prompt": "a"})[0].status == 503
        _, events = ask(port, body={"prompt": "a", "stream": True})
        assert "the engine has failed" in str(events)
        assert loop.pending == 0


def test_a_request_that_the_engine_refuses_is_the_client_s_error():
    with serving(longest=10) as (port, _):
        response, answer = ask(port, body={"prompt": "a", "max_tokens": 100})
        assert response.status == 400 and answer["error"]["code"] == "infeasible"


def test_draining_lets_requests_end_and_closing_does_not():
    with serving(sleep_s=0.002) as (port, loop):
        results = []
        thread = threading.Thread(target=lambda: results.append(ask(port, body={"prompt": "a", "max_tokens": 50})))
        thread.start()
        until(lambda: loop.pending == 1)
        assert loop.close(drain=True, timeout_s=30)
        thread.join()
        assert results[0][0].status == 200
        assert ask(port, "/ready", method="GET")[0].status == 503
        response, answer = ask(port, body={"prompt": "a"})
        assert response.status == 503 and "shutting down" in answer["error"]["message"]
    with serving(sleep_s=0.002) as (port, loop):
        thread = threading.Thread(target=lambda: results.append(ask(port, body=LONG)))
        thread.start()
        until(lambda: loop.pending == 1)
        assert not loop.close(drain=True, timeout_s=0.05)
        assert loop.close(timeout_s=30)
        thread.join()
        assert results[1][0].status == 503 and "shutting down" in results[1][1]["error"]["message"]


def test_many_clients_of_which_a_third_goes_away_are_not_mixed_up():
    """Everybody's answer is what it is alone; nothing is left behind."""

    async def one(client, i):
        stream = await client.completions.create(
            model="fake", prompt=f"client {i}", max_tokens=4 + i % 9, seed=i, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if i % 3 == 2:
                await stream.close()
                return None
        return text

    async def all_of_them(port):
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(60)))

    with serving() as (port, loop):
        texts = asyncio.run(all_of_them(port))
        until(lambda: loop.pending == 0)
    for i, text in enumerate(texts):
        assert text is None if i % 3 == 2 else text == alone(f"client {i}".encode(), 4 + i % 9, seed=i)


def test_the_schema_of_the_interface_takes_what_the_server_takes(port):
    """And every path says what an error is."""
    paths = ask(port, "/openapi.json", method="GET")[1]["paths"]

    def takes(path, body):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        told = jsonschema.Draft202012Validator(schema).is_valid(body)
        assert told == (ask(port, path, body)[0].status == 200), body
        return told

    settings = {"max_tokens": 1, "n": 2, "stop": ["a"], "logprobs": 1, "stream": False}
    assert all(takes("/v1/completions", {"prompt": p, **settings}) for p in ("a", [97], ["a", "b"], [[97], [98]]))
    assert not takes("/v1/completions", {"prompt": "a", "max_tokns": 1})
    assert not takes("/v1/completions", {"prompt": 3})
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_completion_tokens": 1}
    assert takes("/v1/chat/completions", chat)
    assert not takes("/v1/chat/completions", {**chat, "messages": []})
    assert takes("/tokenize", {"prompt": "a"})
    assert all("default" in method["responses"] for path in paths.values() for method in path.values())


def test_a_method_that_a_path_does_not_take_is_told_with_those_it_does(port):
    response, answer = ask(port, "/v1/completions", method="DELETE")
    assert response.status == 405 and response.headers["allow"] == "POST"
    assert "does not take DELETE" in answer["error"]["message"]
