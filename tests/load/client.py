"""An HTTP client that takes little of the processor it shares with the server, and can leave at any moment."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reply:
    """The head of an answer, names of its headers in small letters."""

    status: int
    headers: Mapping[str, str]


class Connection:
    """One connection to a server on this machine, opened when it is first used, and again after it was left."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> asyncio.StreamWriter:
        """Connects where it is not connected."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self._writer

    async def ask(self, path: str, body: bytes, name: str, share: float = 1.0) -> None:
        """Sends a request, or only so much of its body."""
        writer = await self.open()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nx-request-id: {name}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body[: int(share * len(body))])
        await writer.drain()

    async def reply(self) -> Reply:
        """The head of the answer. Raises asyncio.IncompleteReadError where the server hangs up."""
        assert self._reader is not None
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.partition(": ") for line in lines if line)
        return Reply(int(first.split()[1]), {name.lower(): value for name, _, value in pairs})

    async def pieces(self, reply: Reply) -> AsyncGenerator[bytes, None]:
        """The body of the answer as it comes."""
        assert self._reader is not None
        if "content-length" in reply.headers:
            yield await self._reader.readexactly(int(reply.headers["content-length"]))
            return
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        await self._reader.readexactly(2)

    def leave(self) -> None:
        """Hangs up, whatever is under way."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
        self._reader = self._writer = None


def events(body: bytes) -> list[Any]:
    """The JSON of each event of a stream that ended as it should. Raises AssertionError for one that did not."""
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line.startswith(b"data: ")]
    assert lines and lines[-1] == b"[DONE]", f"a stream ends with {body[-100:]!r}"
    return [json.loads(line) for line in lines[:-1]]
