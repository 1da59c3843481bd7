"""The load generator's own HTTP, asked of servers that answer in every way a server may."""

import asyncio
import socket
import threading
from collections.abc import Iterator

import httpx2
import pytest

from engines.adapters.local_transport import LocalTransport

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


class Scripted:
    """A server that answers by a script, a part at a time; `requests` are those it was sent, by connection."""

    def __init__(self, *parts: bytes, answers: int = 1) -> None:
        self._parts, self._answers = parts, answers
        self.requests: list[list[bytes]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.requests.append([])
            with connection:
                for _ in range(self._answers):
                    if not (request := connection.recv(1 << 16)):
                        break
                    self.requests[-1].append(request)
                    for part in self._parts:
                        connection.sendall(part)
                        threading.Event().wait(0.01)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def scripted() -> Iterator[type[Scripted]]:
    made: list[Scripted] = []

    class Made(Scripted):
        def __init__(self, *parts: bytes, answers: int = 1) -> None:
            super().__init__(*parts, answers=answers)
            made.append(self)

    yield Made
    for server in made:
        server.close()


def ask(server: Scripted, times: int = 1, timeout: float | None = 10.0) -> list[tuple[int, bytes]]:
    async def asked() -> list[tuple[int, bytes]]:
        async with httpx2.AsyncClient(transport=LocalTransport(), timeout=timeout) as http:
            found = []
            for _ in range(times):
                response = await http.post(server.url, json={"a": 1})
                found.append((response.status_code, response.content))
            return found

    return asyncio.run(asked())


@pytest.mark.parametrize(
    "parts",
    [
        (HEAD + b"content-length: 5\r\n\r\nhello",),
        (HEAD[:9], HEAD[9:] + b"Content-Length: 5\r\n", b"\r\nhe", b"llo"),
        (CHUNKED, b"2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n"),
        (CHUNKED, b"2\r", b"\nhe\r\n3\r\nl", b"lo\r", b"\n0\r\nx-trailer: 1\r\n", b"\r\n"),
        (HEAD + b"\r\nhel", b"lo"),  # until the server hangs up
    ],
)
def test_an_answer_is_read_however_it_is_cut(scripted: type[Scripted], parts: tuple[bytes, ...]) -> None:
    assert ask(scripted(*parts)) == [(200, b"hello")]


def test_a_request_is_whole_and_a_connection_is_used_again(scripted: type[Scripted]) -> None:
    server = scripted(CHUNKED + b"1\r\na\r\n0\r\n\r\n", answers=3)
    assert ask(server, 3) == [(200, b"a")] * 3
    [requests] = server.requests
    assert len(requests) == 3
    head, _, body = requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1 HTTP/1.1\r\n") and b"\r\ncontent-length: 7" in head.lower() and body == b'{"a":1}'


def test_a_connection_that_the_server_closed_is_not_used_again(scripted: type[Scripted]) -> None:
    server = scripted(HEAD + b"connection: close\r\ncontent-length: 1\r\n\r\na", answers=1)
    assert ask(server, 2) == [(200, b"a")] * 2
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ((CHUNKED, b"5\r\nhel"), httpx2.RemoteProtocolError),
        ((HEAD + b"content-length: 5\r\n\r\nhel",), httpx2.RemoteProtocolError),
        ((b"",), httpx2.RemoteProtocolError),
        ((b"nonsense\r\n\r\n",), httpx2.RemoteProtocolError),
        ((CHUNKED, b"xyz\r\n"), httpx2.RemoteProtocolError),
    ],
)
def test_an_answer_that_breaks_off_or_is_no_http_is_an_error(
    scripted: type[Scripted], parts: tuple[bytes, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        ask(scripted(*parts))


def test_who_does_not_answer_in_time_or_at_all_is_an_error(scripted: type[Scripted]) -> None:
    server = scripted(HEAD, b"content-length: 1\r\n\r\n", *[b""] * 200)
    with pytest.raises(httpx2.ReadTimeout):
        ask(server, timeout=0.1)
    server.close()
    with pytest.raises(httpx2.ConnectError):
        ask(server)
