"""The thread that owns an online engine: takes requests and cancellations from any thread, and hands out events."""

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from harness.api import (
    Event,
    FinishedEvent,
    GenerationRequest,
    HarnessError,
    OnlineEngine,
    OnlineStats,
    RefusedEvent,
    TokenEvent,
)
from harness.common.classify import classify

#: Seconds after which an idle thread looks again whether it shall end.
_IDLE_S = 0.2
#: How old what an engine tells of itself may become while requests run. It takes the engine a part of each pass to say,
#: between two passes, when nothing computes.
_STATS_S = 0.5


@dataclass(frozen=True)
class EngineFailure:
    """The engine broke; none of its requests can go on."""

    reason: str


#: Takes the events of one request, in the engine's thread: it must return at once.
Deliver = Callable[[Event | EngineFailure], None]


@dataclass(frozen=True)
class PendingRequest:
    """A request that was let in `age_s` seconds ago, and has `tokens` of at most `max_tokens` new ones so far."""

    id: str
    prompt_tokens: int
    tokens: int
    max_tokens: int
    age_s: float


@dataclass
class _Pending:
    request: GenerationRequest
    deliver: Deliver
    began_s: float
    tokens: int = 0


class EngineLoop:
    """Steps an engine in a thread of its own for as long as anything is pending.

    `close` lets no request in any more and ends the thread: at once, after the requests are cancelled, or when all are
    done (`drain`). `after_step` is called in that thread when all events of a step are delivered.
    """

    def __init__(self, engine: OnlineEngine, most_pending: int) -> None:
        self._engine = engine
        self._most_pending = most_pending
        self._pending: dict[str, _Pending] = {}  # by the request's id, in the order in which they came
        self._commands: queue.SimpleQueue[GenerationRequest | str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._stats = engine.stats()
        self.failure = ""  # why the engine broke
        self.generated_tokens = 0  # of all requests
        self.after_step: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> OnlineStats:
        """What the engine did, as of the last step in which a request ended, or a later one."""
        return self._stats

    @property
    def pending(self) -> int:
        """Requests that were let in and have not ended."""
        return len(self._pending)

    def pending_requests(self, most: int) -> list[PendingRequest]:
        """The pending requests that came first, at most so many."""
        now = time.monotonic()
        with self._lock:
            return [
                PendingRequest(id_, len(p.request.prompt), p.tokens, p.request.sampling.max_tokens, now - p.began_s)
                for id_, p in islice(self._pending.items(), most)
            ]

    @property
    def closed(self) -> bool:
        """Whether no request is let in any more."""
        return self._closed

    def submit(self, requests: list[tuple[GenerationRequest, Deliver]]) -> bool:
        """Lets requests in, all or none; False where too many are pending. Raises HarnessError where the engine broke
        or the loop is closed."""
        with self._lock:
            if self.failure:
                raise HarnessError(self.failure)
            if self._closed:
                raise HarnessError("the server is shutting down")
            if len(self._pending) + len(requests) > self._most_pending:
                return False
            now = time.monotonic()
            self._pending.update((request.id, _Pending(request, deliver, now)) for request, deliver in requests)
        for request, _ in requests:
            self._commands.put(request)
        return True

    def cancel(self, request_id: str) -> None:
        """Ends a pending request; its last event still comes. Ignores others."""
        self._commands.put(request_id)

    def close(self, drain: bool = False, timeout_s: float | None = None) -> bool:
        """Ends the thread; waits for it at most `timeout_s`. Returns whether it has ended."""
        with self._lock:
            self._closed = True
            left = [] if drain else list(self._pending)
        for request_id in left:
            self.cancel(request_id)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        told_s = -math.inf
        try:
            while self._take_commands():
                events = self._engine.step()
                now_s = time.monotonic()
                if now_s >= told_s + _STATS_S or any(not isinstance(event, TokenEvent) for event in events):
                    # first: who has an answer finds the pass it came from counted
                    self._stats, told_s = self._engine.stats(), now_s
                for event in events:
                    self._hand_out(event)
                self.after_step()
        except BaseException as exc:  # a panic in Rust is no Exception
            refusal = classify(exc)
            with self._lock:
                self.failure = f"the engine has failed ({refusal.status}): {refusal.reason}"
                left, self._pending = self._pending, {}
            for pending in left.values():
                pending.deliver(EngineFailure(self.failure))
            self.after_step()

    def _take_commands(self) -> bool:
        """Passes requests and cancellations on to the engine, waiting for one where it has nothing to do. False where
        the thread shall end."""
        while True:
            try:
                idle = not self._engine.pending()
                command = self._commands.get(timeout=_IDLE_S) if idle else self._commands.get_nowait()
            except queue.Empty:
                if not idle:
                    return True
                with self._lock:
                    if self._closed and not self._pending:
                        return False
                continue
            if isinstance(command, str):
                self._engine.cancel(command)
            else:
                self._engine.submit(command)

    def _hand_out(self, event: Event) -> None:
        request_id = event.result.id if isinstance(event, FinishedEvent) else event.id
        if isinstance(event, FinishedEvent | RefusedEvent):
            with self._lock:
                pending = self._pending.pop(request_id)
        else:
            pending = self._pending[request_id]
        if isinstance(event, TokenEvent):
            pending.tokens += 1
            self.generated_tokens += 1
        pending.deliver(event)
