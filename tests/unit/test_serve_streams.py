"""Streams between the engine's steps and their clients' connections."""

import asyncio
import json
import socket
from dataclasses import replace

import pytest

from engines.adapters.fake import FakeText
from harness.api import GenerationRequest, SamplingParams, TokenEvent
from harness.serve.event_relay import EventRelay
from tests import serving as servers
from tests.serving import SETTINGS, alone, ask, loaded, serving, until


@pytest.fixture
def little_room(monkeypatch):
    """The system keeps little of what a client does not read."""
    listen = servers._listen

    def listening(host, port):
        listener = listen(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(servers, "_listen", listening)


def begin(port, body, version="1.1", window=None):
    """A connection that has asked for a stream, and whose system takes `window` bytes for it."""
    connection = socket.socket()
    if window is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", port))
    sent = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(sent)}"
    connection.sendall(f"{head}\r\n\r\n".encode() + sent)
    return connection


def rest_of(connection):
    """The head of an answer, and all else until the server hangs up."""
    with connection:
        said = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = said.partition(b"\r\n\r\n")
    return head, body


def unchunked(body):
    """What chunks hold. The last one must be there."""
    held = []
    while size := int(body.partition(b"\r\n")[0], 16):
        body = body.partition(b"\r\n")[2]
        held.append(body[:size])
        body = body[size + 2 :]
    assert body == b"0\r\n\r\n"
    return b"".join(held)


def text_of(events):
    """The text of a stream that ended well."""
    *lines, done, after = events.decode().split("\n\n")
    assert (done, after) == ("data: [DONE]", "")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if not line.startswith(":")]
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "length"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.usefixtures("little_room")
def test_who_reads_late_gets_all_in_order_and_holds_up_nobody():
    body = {"prompt": "hi", "max_tokens": 4000, "seed": 3, "ignore_eos": True}
    with serving() as (port, loop):
        late = begin(port, body, window=4096)
        until(lambda: loop.generated_tokens == 4000 and not loop.pending)
        assert ask(port, body={"prompt": "a", "max_tokens": 3})[0].status == 200
        _, said = rest_of(late)
    assert len(said) > 500_000, "far more than the system and the connection keep"
    assert text_of(unchunked(said)) == alone(b"hi", 4000, seed=3)


@pytest.mark.usefixtures("little_room")
def test_a_client_that_never_reads_is_cut_off_amid_its_stream():
    with serving(replace(SETTINGS, patience_s=0.3)) as (port, loop):
        never = begin(port, {"prompt": "hi", "max_tokens": 4000, "ignore_eos": True}, window=4096)
        until(lambda: b'outcome="cancelled"} 1.0' in ask(port, "/metrics", method="GET")[1])
        until(lambda: not loop.pending)
        assert not rest_of(never)[1].endswith(b"0\r\n\r\n")


def test_a_client_of_http_1_0_gets_its_stream_without_chunks():
    with serving() as (port, _):
        head, said = rest_of(begin(port, {"prompt": "hi", "max_tokens": 6, "seed": 3, "ignore_eos": True}, "1.0"))
    assert b"chunked" not in head.lower()
    assert text_of(said) == alone(b"hi", 6, seed=3)


def test_a_stream_that_cannot_be_written_ends_alone(monkeypatch, capfd):
    [bad] = loaded().generate([GenerationRequest("0", (97,), SamplingParams(30, temperature=1.0, seed=1))])
    decode = FakeText.decode

    def breaks(self, tokens):
        if tuple(tokens[:2]) == bad.tokens[:2]:
            raise RuntimeError("no such token")
        return decode(self, tokens)

    with serving(sleep_s=0.01) as (port, loop):
        expected = alone(b"a", 30, seed=2)
        monkeypatch.setattr(FakeText, "decode", breaks)
        both = [begin(port, {"prompt": "a", "max_tokens": 30, "seed": seed, "ignore_eos": True}) for seed in (1, 2)]
        broken, whole = (rest_of(connection)[1] for connection in both)
        until(lambda: not loop.pending)
    assert not broken.endswith(b"0\r\n\r\n"), "cut off, as what is not whole must look"
    assert text_of(unchunked(whole)) == expected
    assert "RuntimeError: no such token" in capfd.readouterr().err


def test_a_step_s_events_come_in_order_and_each_receiver_writes_once():
    told = []

    class Told:
        def __init__(self, name):
            self.name = name

        def take(self, event):
            told.append((self.name, event.token))

        def flush(self):
            told.append((self.name, "written"))

    async def two_steps():
        relay, a, b = EventRelay(), Told("a"), Told("b")
        relay.open()
        for token, receiver in ((1, a), (2, b), (3, a)):
            relay.put(receiver, TokenEvent("0", token, 0.0))
        relay.send()
        relay.send()  # of nothing
        await asyncio.sleep(0)
        relay.put(b, TokenEvent("0", 4, 0.0))
        relay.send()
        await asyncio.sleep(0)

    asyncio.run(two_steps())
    assert told == [("a", 1), ("b", 2), ("a", 3), ("a", "written"), ("b", "written"), ("b", 4), ("b", "written")]
