"""One HTTP request whose answer is under way: from the engine's events to a body or a stream."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from harness.api import Event, FinishedEvent, RefusedEvent, TokenEvent
from harness.serve.answers import Answer
from harness.serve.engine_loop import EngineFailure, EngineLoop
from harness.serve.errors import error
from harness.serve.metrics import Metrics
from harness.serve.post import Post

#: How often a request whose answer is not streamed looks whether its client is still there.
_LOOK_S = 1.0


class Running:
    """An HTTP request whose engine requests run; however it ends, none of them goes on.

    What happens once a token, at many streams, takes a part of the engine's time: so events of a step come together and
    leave in one write, and a timer is set once a silence, not once an event.
    """

    def __init__(
        self, loop: EngineLoop, post: Post, clock: Callable[[], float], metrics: Metrics, answer: Answer,
        keep_alive_s: float,
    ) -> None:  # fmt: skip
        self._loop, self._post, self._clock, self._metrics, self._answer = loop, post, clock, metrics, answer
        self._keep_alive_s = keep_alive_s
        self._events: asyncio.Queue[Event | EngineFailure | None] = asyncio.Queue()
        self._reminder: asyncio.TimerHandle | None = None
        self._let_in_s = self._heard_s = 0.0
        self._outcome, self._ended = "cancelled", False

    def begin(self) -> bool:
        """As EngineLoop.submit."""
        put, take, streamed = self._post.put, self._events.put_nowait, self._answer.asked.stream

        def deliver(event: Event | EngineFailure) -> None:
            if isinstance(event, TokenEvent) and not streamed:
                return  # each one would wake the server's thread, which the engine's shares a processor with
            if isinstance(event, FinishedEvent) and event.result.finish_reason == "cancelled":  # not by this request
                event = EngineFailure("the server is shutting down")
            put(take, event)

        self._post.open()
        self._let_in_s = self._clock()
        return self._loop.submit([(request, deliver) for request in self._answer.requests])

    async def whole(self, request: Request) -> Response:
        """The answer in one piece."""
        try:
            while not self._answer.done:
                for event in await self._arrived(_LOOK_S):
                    if event is None:
                        if await request.is_disconnected():
                            return Response(status_code=499)  # which nobody reads
                    elif isinstance(event, FinishedEvent):
                        self._answer.finish(event)
                        self._metrics.answered(event.result, self._let_in_s)
                    elif not isinstance(event, TokenEvent):
                        return self._failed(event)
            self._outcome = "ok"
            return JSONResponse(self._answer.whole())
        finally:
            self.end()

    def streamed(self) -> Response:
        """The answer in chunks."""
        return _Streamed(self)

    async def chunks(self) -> AsyncIterator[str]:
        """What a stream consists of; a comment now and then while there is nothing, for what closes silent
        connections."""
        done = False
        for chunk in self._answer.opening():
            yield chunk
        while not done:
            chunks: list[str] = []
            for event in await self._arrived(self._keep_alive_s):
                if event is None:
                    chunks.append(": keep-alive\n\n")
                    continue
                if not isinstance(event, TokenEvent | FinishedEvent):
                    yield f"{''.join(chunks)}data: {bytes(self._failed(event).body).decode()}\n\n"
                    return
                if isinstance(event, FinishedEvent):
                    self._metrics.answered(event.result, self._let_in_s)
                chunks += self._answer.chunks(event)
            if done := self._answer.done:
                chunks += self._answer.closing()
            if chunks:
                yield "".join(chunks)
        self._outcome = "ok"

    def end(self) -> None:
        """Counts how the request ended, and cancels what it leaves."""
        if self._ended:
            return
        self._ended = True
        if self._reminder is not None:
            self._reminder.cancel()
        self._metrics.ended(self._outcome)
        if self._outcome != "ok":
            for request in self._answer.requests:
                self._loop.cancel(request.id)

    async def _arrived(self, patience_s: float) -> list[Event | EngineFailure | None]:
        """The next events, all of them that have come; None among them where there was none for so many seconds."""
        if self._reminder is None:
            self._heard_s = time.monotonic()
            self._remind(patience_s)
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        self._heard_s = time.monotonic()
        return events

    def _remind(self, patience_s: float) -> None:
        """Puts None among the events after a silence of so many seconds, and looks again when the next one can end."""
        left = self._heard_s + patience_s - time.monotonic()
        if left <= 0:
            left = patience_s
            if self._events.empty():
                self._events.put_nowait(None)
        self._reminder = asyncio.get_running_loop().call_later(left, self._remind, patience_s)

    def _failed(self, event: RefusedEvent | EngineFailure) -> JSONResponse:
        """The answer where the engine refuses a request or breaks down under it."""
        if isinstance(event, EngineFailure):
            self._outcome = "failed"
            return error(event.reason, 503, "unavailable")
        self._outcome = "refused"
        return error(event.reason, 400, "invalid_request" if event.kind == "invalid" else "infeasible")


class _Streamed(StreamingResponse):
    """Ends its request itself: the iterator cannot where its client leaves before the first chunk is asked for."""

    def __init__(self, running: Running) -> None:
        super().__init__(running.chunks(), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            self._running.end()
