"""HTTP/1.1 to a server on this machine, at a tenth of the processor's time: what a load generator takes, the server on
the same cores lacks."""

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx2

_Address = tuple[str, int]


class LocalTransport(httpx2.AsyncBaseTransport):
    """Plain HTTP over connections that are kept while they are idle, any number at a time.

    Honours a request's timeouts of connecting and reading. Raises httpx2's errors.
    """

    def __init__(self) -> None:
        self._idle: dict[_Address, list[_Connection]] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        timeouts = request.extensions.get("timeout", {})
        address = request.url.host, request.url.port or 80
        connection = self._kept(address) or await _connect(address, timeouts.get("connect"))
        try:
            body = b"".join([part async for part in _parts(request)])
            head = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
            head += [b"%b: %b" % pair for pair in request.headers.raw]
            connection.send(b"\r\n".join([*head, b"", body]))
            return await connection.response(timeouts.get("read"), self._idle.setdefault(address, []).append)
        except BaseException:
            connection.close()
            raise

    def _kept(self, address: _Address) -> "_Connection | None":
        idle = self._idle.get(address, [])
        while idle:
            if not (connection := idle.pop()).closed:
                return connection
        return None

    async def aclose(self) -> None:
        for idle in self._idle.values():
            while idle:
                idle.pop().close()


async def _parts(request: httpx2.Request) -> AsyncIterator[bytes]:
    assert isinstance(request.stream, httpx2.AsyncByteStream)
    async for part in request.stream:
        yield part


async def _connect(address: _Address, timeout: float | None) -> "_Connection":
    try:
        async with asyncio.timeout(timeout):
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, *address)
    except TimeoutError as exc:
        raise httpx2.ConnectTimeout(f"no connection within {timeout:g} s") from exc
    except OSError as exc:
        raise httpx2.ConnectError(str(exc)) from exc
    return connection


class _Connection(asyncio.Protocol):
    """One connection: bytes as they come."""

    def __init__(self) -> None:
        self._buffer = b""
        self._waiter: asyncio.Future[None] | None = None
        self._lost: Exception | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed, self._lost = True, exc
        self._wake()

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self.closed = True
        self._transport.abort()

    async def response(self, timeout: float | None, keep: Callable[["_Connection"], None]) -> httpx2.Response:
        """The head of the answer; `keep` is given this connection once its body is read."""
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            await self.more(timeout)
        first, *lines = self.take(end + 4)[:-4].split(b"\r\n")
        try:
            status = int(first.split(None, 2)[1])
            headers = [(name.strip(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        except (IndexError, ValueError):
            raise httpx2.RemoteProtocolError(f"no HTTP: {first[:80]!r}") from None
        small = {name.lower(): value.lower() for name, value in headers}
        return httpx2.Response(status, headers=headers, stream=_Body(self, small, timeout, keep))

    async def more(self, timeout: float | None) -> None:
        """Waits for further bytes. Raises httpx2's errors where none come."""
        if self.closed:
            if self._lost is not None:
                raise httpx2.ReadError(f"{type(self._lost).__name__} {self._lost}")
            raise httpx2.RemoteProtocolError("the server closed the connection amid its answer")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            if timeout is None:
                await self._waiter
            else:
                async with asyncio.timeout(timeout):
                    await self._waiter
        except TimeoutError as exc:
            raise httpx2.ReadTimeout(f"nothing came within {timeout:g} s") from exc
        finally:
            self._waiter = None

    def take(self, count: int | None) -> bytes:
        """As many of the bytes that are there; None for all."""
        taken = self._buffer[:count]
        self._buffer = self._buffer[len(taken) :]
        return taken

    def chunks(self) -> tuple[bytes, bool]:
        """The chunks that are there whole, as one, and whether the last one is."""
        buffer, at, found = self._buffer, 0, list[bytes]()
        while (end := buffer.find(b"\r\n", at)) >= 0:
            try:
                size = int(buffer[at:end].partition(b";")[0], 16)
            except ValueError:
                raise httpx2.RemoteProtocolError(f"no chunk: {buffer[at:end][:80]!r}") from None
            if not size:
                over = buffer.find(b"\r\n\r\n", end)  # behind trailers, if any
                if over >= 0:
                    self._buffer = buffer[over + 4 :]
                    return b"".join(found), True
                break
            if len(buffer) < end + 2 + size + 2:
                break
            found.append(buffer[end + 2 : end + 2 + size])
            at = end + 2 + size + 2
        self._buffer = buffer[at:]
        return b"".join(found), False

    @property
    def ended(self) -> bool:
        """Whether the server has hung up in good order."""
        return self.closed and self._lost is None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Body(httpx2.AsyncByteStream):
    """The body of an answer. Once it is read, its connection is kept."""

    def __init__(
        self, connection: _Connection, headers: dict[bytes, bytes], timeout: float | None,
        keep: Callable[[_Connection], None],
    ) -> None:  # fmt: skip
        self._connection, self._headers, self._timeout, self._keep = connection, headers, timeout, keep
        self._whole = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        connection = self._connection
        if self._headers.get(b"transfer-encoding") == b"chunked":
            while True:
                piece, self._whole = connection.chunks()
                if piece:
                    yield piece
                if self._whole:
                    return
                await connection.more(self._timeout)
        length = self._headers.get(b"content-length")
        left = int(length) if length is not None else None  # None: what comes until the server hangs up
        while left != 0:
            if piece := connection.take(left):
                left = None if left is None else left - len(piece)
                yield piece
            elif left is None and connection.ended:
                return
            else:
                await connection.more(self._timeout)
        self._whole = True

    async def aclose(self) -> None:
        if self._whole and not self._connection.closed and self._headers.get(b"connection") != b"close":
            self._keep(self._connection)
        else:
            self._connection.close()
