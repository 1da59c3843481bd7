"""One HTTP request whose answer is under way: from the engine's events to a body or a stream."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from harness.api import Event, FinishedEvent, RefusedEvent, TokenEvent
from harness.serve.answers import Answer
from harness.serve.engine_loop import EngineFailure, EngineLoop
from harness.serve.errors import error
from harness.serve.metrics import Metrics

#: How often a request whose answer is not streamed looks whether its client is still there.
_LOOK_S = 1.0


class Running:
    """An HTTP request whose engine requests run; however it ends, none of them goes on."""

    def __init__(
        self, loop: EngineLoop, clock: Callable[[], float], metrics: Metrics, answer: Answer, keep_alive_s: float
    ) -> None:
        self._loop, self._clock, self._metrics, self._answer = loop, clock, metrics, answer
        self._keep_alive_s = keep_alive_s
        self._events: asyncio.Queue[Event | EngineFailure] = asyncio.Queue()
        self._let_in_s = 0.0

    def begin(self) -> bool:
        """As EngineLoop.submit."""
        loop, streamed = asyncio.get_running_loop(), self._answer.asked.stream

        def deliver(event: Event | EngineFailure) -> None:
            if not streamed and isinstance(event, TokenEvent):
                return  # each one would wake the server's thread, which the engine's shares a processor with
            with contextlib.suppress(RuntimeError):  # the server's loop has ended
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._let_in_s = self._clock()
        return self._loop.submit([(request, deliver) for request in self._answer.requests])

    async def whole(self, request: Request) -> Response:
        """The answer in one piece."""
        outcome, looked = "cancelled", time.monotonic()
        try:
            while not self._answer.done:
                event = await self._next(_LOOK_S)
                if time.monotonic() - looked >= _LOOK_S:
                    if await request.is_disconnected():
                        return Response(status_code=499)  # which nobody reads
                    looked = time.monotonic()
                if event is None:
                    continue
                if not isinstance(event, TokenEvent | FinishedEvent):
                    outcome, failure = self._failed(event)
                    return failure
                if isinstance(event, FinishedEvent):
                    self._finish(event)
            outcome = "ok"
            return JSONResponse(self._answer.whole())
        finally:
            self._end(outcome)

    async def stream(self) -> AsyncIterator[str]:
        """The answer in chunks; a comment now and then while there is none, for what closes silent connections."""
        outcome = "cancelled"
        try:
            for chunk in self._answer.opening():
                yield chunk
            while not self._answer.done:
                event = await self._next(self._keep_alive_s)
                if event is None:
                    yield ": keep-alive\n\n"
                    continue
                if not isinstance(event, TokenEvent | FinishedEvent):
                    outcome, failure = self._failed(event)
                    yield f"data: {bytes(failure.body).decode()}\n\n"
                    return
                if isinstance(event, FinishedEvent):
                    self._metrics.answered(event.result, self._let_in_s)
                for chunk in self._answer.chunks(event):
                    yield chunk
            for chunk in self._answer.closing():
                yield chunk
            outcome = "ok"
        finally:
            self._end(outcome)

    async def _next(self, patience_s: float) -> Event | EngineFailure | None:
        """The next event; None if there is none for so many seconds."""
        try:
            event = await asyncio.wait_for(self._events.get(), patience_s)
        except TimeoutError:
            return None
        if isinstance(event, FinishedEvent) and event.result.finish_reason == "cancelled":  # not by this request
            return EngineFailure("the server is shutting down")
        return event

    def _finish(self, event: FinishedEvent) -> None:
        self._answer.finish(event)
        self._metrics.answered(event.result, self._let_in_s)

    def _failed(self, event: RefusedEvent | EngineFailure) -> tuple[str, JSONResponse]:
        """How a request ends that the engine refuses or breaks down under."""
        if isinstance(event, EngineFailure):
            return "failed", error(event.reason, 503, "unavailable")
        return "refused", error(event.reason, 400, "invalid_request" if event.kind == "invalid" else "infeasible")

    def _end(self, outcome: str) -> None:
        self._metrics.ended(outcome)
        if outcome != "ok":
            for request in self._answer.requests:
                self._loop.cancel(request.id)
