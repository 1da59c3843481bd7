"""Clients that read a byte a second: they hold up nobody else, and no place in the engine."""

import asyncio
import json
import socket
import time

from tests.load.bench import Bench, say
from tests.load.client import Connection
from tests.load.server import serving

_READERS = 20
_OTHERS = 50
_BODY = {"prompt": "w3 w4", "max_tokens": 60, "ignore_eos": True}


def slow_reader(bench: Bench) -> None:
    """Raises AssertionError where others are not answered, or where the engine waits for the slow ones."""
    with serving(bench.settings) as server:
        slow = [_begin(server.port) for _ in range(_READERS)]
        began, answered = time.monotonic(), 0
        while time.monotonic() < began + bench.seconds:
            assert asyncio.run(_others(server.port)) == _OTHERS
            answered += _OTHERS
            for connection in slow:
                assert len(connection.recv(1)) == 1
            time.sleep(max(0.0, 1.0 - (time.monotonic() - began) % 1.0))
        pending = server.get("/status")["pending"]
        said = b"".join(iter(lambda: slow[0].recv(1 << 16), b""))
        say(f"{_READERS} clients read a byte a second for {bench.seconds:g} s: {answered} requests of others answered, "
            f"{pending} pending; then one read the rest, {len(said)} bytes")  # fmt: skip
        assert not pending, "the engine waits for clients that are slow"
        assert said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), said[-100:]
        for connection in slow:
            connection.close()
        assert not any("Traceback" in line for line in server.said), "".join(server.said)


def _begin(port: int) -> socket.socket:
    """A client whose system takes little for it, and which has asked for a stream."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.settimeout(60)
    body = json.dumps({**_BODY, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


async def _others(port: int) -> int:
    """How many of others are answered."""

    async def one() -> int:
        connection = Connection(port)
        await connection.ask("/v1/completions", json.dumps(_BODY).encode(), "quick")
        reply = await connection.reply()
        async for _ in connection.pieces(reply):
            pass
        connection.leave()
        return reply.status == 200

    return sum(await asyncio.gather(*(one() for _ in range(_OTHERS))))
