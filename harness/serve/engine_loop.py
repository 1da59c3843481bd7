"""The thread that owns an online engine: takes requests and cancellations from any thread, and hands out events."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from harness.api import Event, FinishedEvent, GenerationRequest, HarnessError, OnlineEngine, OnlineStats, RefusedEvent
from harness.common.classify import classify

#: Seconds after which an idle thread looks again whether it shall end.
_IDLE_S = 0.2


@dataclass(frozen=True)
class EngineFailure:
    """The engine broke; none of its requests can go on."""

    reason: str


#: Takes the events of one request, in the engine's thread: it must return at once.
Deliver = Callable[[Event | EngineFailure], None]


class EngineLoop:
    """Steps an engine in a thread of its own for as long as anything is pending.

    `close` lets no request in any more and ends the thread: at once, after the requests are cancelled, or when all are
    done (`drain`).
    """

    def __init__(self, engine: OnlineEngine, most_pending: int) -> None:
        self._engine = engine
        self._most_pending = most_pending
        self._deliver: dict[str, Deliver] = {}  # by the id of a pending request
        self._commands: queue.SimpleQueue[GenerationRequest | str] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._stats = engine.stats()
        self.failure = ""  # why the engine broke
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> OnlineStats:
        """What the engine did, as of its last step."""
        return self._stats

    @property
    def pending(self) -> int:
        """Requests that were let in and have not ended."""
        return len(self._deliver)

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
            if len(self._deliver) + len(requests) > self._most_pending:
                return False
            self._deliver.update((request.id, deliver) for request, deliver in requests)
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
            left = [] if drain else list(self._deliver)
        for request_id in left:
            self.cancel(request_id)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._take_commands():
                for event in self._engine.step():
                    self._hand_out(event)
                self._stats = self._engine.stats()
        except Exception as exc:
            refusal = classify(exc)
            with self._lock:
                self.failure = f"the engine has failed ({refusal.status}): {refusal.reason}"
                left, self._deliver = self._deliver, {}
            for deliver in left.values():
                deliver(EngineFailure(self.failure))

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
                    if self._closed and not self._deliver:
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
                deliver = self._deliver.pop(request_id)
        else:
            deliver = self._deliver[request_id]
        deliver(event)
