"""Connections of clients: as many as the process can hold, none that is silent before it asks or never reads."""

import asyncio
import resource
from collections.abc import Callable
from typing import Any, Protocol, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from harness.api import HarnessError
from harness.serve.errors import error

#: Descriptors that the process needs beside those of connections: models, files, the engine.
_OTHER_DESCRIPTORS = 256
#: So many clients that were refused may take their time to read why, each for so long.
_MOST_LINGERING, _LINGER_S = 64, 2.0


class Connection(Protocol):
    """What an application finds as `connection` in its scope's state: a way past ASGI for pieces of an answer whose
    head is sent and whose end is not. Through all its layers a piece takes as long as to make."""

    #: Called when the connection is writable again.
    on_writable: Callable[[], None] | None

    @property
    def writable(self) -> bool:
        """Whether the client takes what it is sent."""

    @property
    def lost(self) -> bool:
        """Whether the client went away before its answer was whole."""

    def write_body(self, piece: bytes) -> None:
        """Writes a piece, which is not empty; drops it where the client has gone."""


def reserve_descriptors(most_connections: int) -> None:
    """Lets this process open as many descriptors as so many connections need. Raises HarnessError where the system does
    not allow them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most_connections + _OTHER_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise HarnessError(
            f"--max-connections {most_connections}: this process may open {hard} files; raise that (ulimit -n), or "
            f"give at most {max(1, hard - _OTHER_DESCRIPTORS)}"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def connection_class(most: int, patience_s: float) -> type[asyncio.Protocol]:
    """The protocol of a server's connections.

    One beyond `most` is answered with 503. It stays for the client's request, which is dropped, for _LINGER_S at most:
    a connection that is closed before the request has come is reset, and the answer lost. One is closed that has not
    asked anything within `patience_s` of its beginning, or of the first byte after an answer, or that takes nothing of
    its answer for as long.
    """

    refused: set[asyncio.Protocol] = set()

    class ClientConnection(H11Protocol):
        _asking: asyncio.TimerHandle | None = None  # until a request is there
        _reading: asyncio.TimerHandle | None = None  # until the client takes something
        on_writable: Callable[[], None] | None = None

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.app_state = {**self.app_state, "connection": self}

        @property
        def writable(self) -> bool:
            return not self.flow.write_paused

        @property
        def lost(self) -> bool:
            return self.cycle.disconnected

        def write_body(self, piece: bytes) -> None:
            if self.transport.is_closing():
                return
            if self.scope["http_version"] >= "1.1":  # a chunk: h11 writes the same, in as long as the system takes
                piece = b"%x\r\n%b\r\n" % (len(piece), piece)
            self.transport.write(piece)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                self._refuse(transport)
            else:
                self._asking = self.loop.call_later(patience_s, transport.abort)

        def _refuse(self, transport: Any) -> None:
            self.connections.discard(self)
            transport.write(_refusal(most))
            if len(refused) < _MOST_LINGERING:
                refused.add(self)
                transport.write_eof()
                self._asking = self.loop.call_later(_LINGER_S, transport.close)
            else:
                transport.close()

        def data_received(self, data: bytes) -> None:
            if self in refused:
                return
            super().data_received(data)
            if self.cycle and not self.cycle.response_complete:
                self._end_asking()
            elif self._asking is None:
                self._asking = self.loop.call_later(patience_s, self.transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            refused.discard(self)
            self._end_asking()
            self._end_reading()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._end_reading()
            self._reading = self.loop.call_later(patience_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._end_reading()
            if self.on_writable is not None:
                self.on_writable()

        def _end_asking(self) -> None:
            if self._asking is not None:
                self._asking.cancel()
                self._asking = None

        def _end_reading(self) -> None:
            if self._reading is not None:
                self._reading.cancel()
                self._reading = None

    return ClientConnection


def _refusal(most: int) -> bytes:
    """The whole HTTP answer to a connection too many."""
    response = error(f"{most} clients are connected, as many as this server holds; try again", 503, "too_many_clients")
    body = cast(bytes, response.body)
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
