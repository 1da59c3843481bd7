"""One HTTP request whose answer is under way: from the engine's events to a body or a stream."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from harness.api import Event, FinishedEvent, RefusedEvent, TokenEvent
from harness.serve.answers import Answer
from harness.serve.connections import Connection
from harness.serve.engine_loop import EngineFailure, EngineLoop
from harness.serve.errors import error
from harness.serve.event_relay import EventRelay
from harness.serve.metrics import Metrics

_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Running:
    """An HTTP request whose engine requests run; however it ends, none of them goes on.

    What happens once a token takes a part of the engine's time, on a machine whose cores all compute: so no task wakes
    for it. A stream's events become text in the call that hands a step over, leave in one write to the connection, and
    the request's task wakes when all are there.
    """

    def __init__(
        self, loop: EngineLoop, relay: EventRelay, clock: Callable[[], float], metrics: Metrics, answer: Answer,
        keep_alive_s: float,
    ) -> None:  # fmt: skip
        self._loop, self._relay, self._clock, self._metrics, self._answer = loop, relay, clock, metrics, answer
        self._keep_alive_s = keep_alive_s
        self._streams = answer.asked.stream
        self._over = asyncio.Event()  # all events are there, or it cannot go on for one of two reasons:
        self._failure: RefusedEvent | EngineFailure | None = None
        self._raised: Exception | None = None
        self._pieces: list[str] = []  # of a stream, not written yet
        self._connection: Connection | None = None  # once the stream has begun
        self._reminder: asyncio.TimerHandle | None = None
        self._let_in_s = self._heard_s = 0.0
        self._outcome, self._ended = "cancelled", False

    def begin(self) -> bool:
        """As EngineLoop.submit."""

        def deliver(event: Event | EngineFailure) -> None:
            if isinstance(event, TokenEvent) and not self._streams:
                return  # each one would wake the server's thread, which the engine's shares a processor with
            if isinstance(event, FinishedEvent) and event.result.finish_reason == "cancelled":  # not by this request
                event = EngineFailure("the server is shutting down")
            self._relay.put(self, event)

        self._relay.open()
        self._let_in_s = self._clock()
        return self._loop.submit([(request, deliver) for request in self._answer.requests])

    def take(self, event: Event | EngineFailure) -> None:
        """An event of the engine; what it raises ends this request alone."""
        if self._over.is_set():
            return
        try:
            self._settle(event)
        except Exception as exc:
            self._raised = exc
            self._over.set()

    def flush(self) -> None:
        """Writes what there is of a stream that has begun, if its client takes it. The last piece is left to the
        request's task."""
        connection = self._connection
        if connection is None or not self._pieces or self._over.is_set() or not connection.writable:
            return
        self._heard_s = time.monotonic()
        connection.write_body(self._text())

    async def whole(self, receive: Receive) -> Response:
        """The answer in one piece."""
        try:
            await self._until_over(receive)
            if self._failure is not None:
                return self._failed(self._failure)
            body = await asyncio.to_thread(self._answer.whole) if self._answer.is_large else self._answer.whole()
            self._outcome = "ok"
            return JSONResponse(body)
        except ClientDisconnect:
            return Response(status_code=499)  # which nobody reads
        finally:
            self.end()

    def streamed(self) -> Response:
        """The answer in chunks."""
        return _Streamed(self)

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with a stream; a comment now and then while there is nothing, for what closes silent connections.

        Its head and its end go the way of any answer, the rest straight to the connection.
        """
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        self._pieces[:0] = self._answer.opening()
        connection: Connection = scope["state"]["connection"]
        self._connection, connection.on_writable = connection, self.flush
        self._heard_s = time.monotonic()
        self._remind()
        self.flush()
        try:
            await self._until_over(receive)
        finally:
            connection.on_writable = None
        if self._failure is not None:
            self._pieces.append(f"data: {bytes(self._failed(self._failure).body).decode()}\n\n")
        await send({"type": "http.response.body", "body": self._text(), "more_body": False})
        if self._failure is None and not connection.lost:
            self._outcome = "ok"

    def end(self) -> None:
        """Counts how the request ended, and cancels what it leaves."""
        if self._ended:
            return
        self._ended = True
        self._over.set()
        if self._reminder is not None:
            self._reminder.cancel()
        self._metrics.ended(self._outcome)
        if self._outcome != "ok":
            for request in self._answer.requests:
                self._loop.cancel(request.id)

    def _settle(self, event: Event | EngineFailure) -> None:
        if not isinstance(event, TokenEvent | FinishedEvent):
            self._failure = event
            self._over.set()
            return
        if self._streams and (chunks := self._answer.chunks(event)):
            self._pieces.append(chunks)
        if isinstance(event, FinishedEvent):
            self._metrics.answered(event.result, self._let_in_s)
            self._answer.finish(event)
            if self._answer.done:
                if self._streams:
                    self._pieces += self._answer.closing()
                self._over.set()

    async def _until_over(self, receive: Receive) -> None:
        """Raises ClientDisconnect where the client goes away before."""

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            if not self._over.is_set():
                self._raised = ClientDisconnect()
                self._over.set()

        listening = asyncio.create_task(listen())
        try:
            await self._over.wait()
        finally:
            listening.cancel()
        if self._raised is not None:
            raise self._raised

    def _remind(self) -> None:
        """Writes a comment after a silence, and looks again when the next one can end: a timer a silence, not one a
        token."""
        left = self._heard_s + self._keep_alive_s - time.monotonic()
        if left <= 0:
            left = self._keep_alive_s
            if not self._pieces:  # else they wait for a client that does not read
                self._pieces.append(": keep-alive\n\n")
                self.flush()
        self._reminder = asyncio.get_running_loop().call_later(left, self._remind)

    def _text(self) -> bytes:
        """The pieces that are not written yet, as one."""
        pieces, self._pieces = self._pieces, []
        return "".join(pieces).encode()

    def _failed(self, event: RefusedEvent | EngineFailure) -> JSONResponse:
        """The answer where the engine refuses a request or breaks down under it."""
        if isinstance(event, EngineFailure):
            self._outcome = "failed"
            return error(event.reason, 503, "unavailable")
        self._outcome = "refused"
        return error(event.reason, 400, "invalid_request" if event.kind == "invalid" else "infeasible")


class _Streamed(Response):
    """A stream that has yet to begin; the request ends with it, also where its client left before."""

    def __init__(self, running: Running) -> None:
        super().__init__()
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect, OSError):
                await self._running.stream(scope, receive, send)
        finally:
            self._running.end()
