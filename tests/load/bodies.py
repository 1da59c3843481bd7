"""Bodies of many MiB: refused without being kept, or taken as files, while others are served."""

import http.client
import json
import socket
import threading
from collections import Counter

from tests.load.bench import Bench, say
from tests.load.server import Server, serving

_PIECE = b"x" * (1 << 20)
_AT_ONCE = 8
#: What a server may hold more than before, at most, while eight such bodies come: 16 MiB of each, until it is refused.
_MOST_MORE = _AT_ONCE * (3 * 16 << 20)


def bodies(bench: Bench) -> None:
    """Raises AssertionError for another answer than is documented, and for memory that grows with the bodies."""
    with serving(bench.settings) as server:
        size, found, before = bench.body_mib << 20, Counter[int](), server.held_bytes()
        threads = [
            threading.Thread(target=lambda sends=sends: found.update([sends(server.port, size)]))
            for sends in (_counted, _chunked) * (_AT_ONCE // 2)
        ]
        for thread in threads:
            thread.start()
        assert server.get("/health") == {"status": "ok"}
        for thread in threads:
            thread.join()
        more = server.peak_bytes - before
        say(f"{_AT_ONCE} bodies of {bench.body_mib} MiB at once: {dict(found)}, {more >> 20} MiB more at most")
        assert found == {413: _AT_ONCE}, found
        assert more <= _MOST_MORE
        before = server.peak_bytes
        uploaded = _uploaded(server, size)
        say(f"a file of {bench.body_mib} MiB: {uploaded}, {(server.peak_bytes - before) >> 20} MiB more at most")
        assert uploaded == 200
        assert server.peak_bytes - before < size // 2, "a file is not kept in memory"
        _left(server, size)
        assert server.get("/health") == {"status": "ok"}
        assert not any("Traceback" in line for line in server.said), "".join(server.said)


def _counted(port: int, size: int) -> int:
    """Of a body whose length is told before it."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(_head("/v1/completions", f"content-length: {size}"))
        _send(connection, *[_PIECE] * (size >> 20))
        return _status(connection, size)


def _chunked(port: int, size: int) -> int:
    """Of one in chunks."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(_head("/v1/chat/completions", "transfer-encoding: chunked"))
        chunk = f"{len(_PIECE):x}\r\n".encode() + _PIECE + b"\r\n"
        _send(connection, *[chunk] * (size >> 20), b"0\r\n\r\n")
        return _status(connection, size)


def _uploaded(server: Server, size: int) -> int:
    """Of a file."""
    parts = (
        b'--edge\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--edge\r\n'
        b'content-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n',
        b"\r\n--edge--\r\n",
    )
    length = size + sum(map(len, parts))
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
        connection.sendall(
            _head("/v1/files", f"content-length: {length}\r\ncontent-type: multipart/form-data; boundary=edge")
        )
        _send(connection, parts[0], *[_PIECE] * (size >> 20), parts[1])
        return _status(connection, size)


def _left(server: Server, size: int) -> None:
    """A client that announces as much and goes away after one MiB."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as connection:
        connection.sendall(_head("/v1/completions", f"content-length: {size}") + _PIECE)


def _head(path: str, headers: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{headers}\r\n\r\n".encode()


def _send(connection: socket.socket, *pieces: bytes) -> None:
    for piece in pieces:
        connection.sendall(piece)


def _status(connection: socket.socket, size: int) -> int:
    response = http.client.HTTPResponse(connection)
    response.begin()
    answer = json.loads(response.read())
    assert "error" in answer or answer["bytes"] == size, answer
    return response.status
