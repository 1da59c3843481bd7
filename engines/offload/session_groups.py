"""Sessions whose passes are under way at the same time, as one session; and a job run through either."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from engines.offload.session import Session
from harness.api import (
    Event,
    FinishedEvent,
    GenerationRequest,
    GenerationResult,
    HarnessError,
    InfeasibleError,
    RefusedEvent,
)


class SessionGroups:
    """Requests divided over `sessions`, by the methods of harness.api.OnlineEngine; each has its own KV blocks."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._sessions = sessions
        self._in_flight: deque[Session] = deque()

    def clock(self) -> float:
        """Seconds since the sessions began."""
        return self._sessions[0].clock()

    @property
    def running(self) -> int:
        """How many requests hold KV blocks; the other pending ones wait."""
        return sum(session.running for session in self._sessions)

    def pending(self) -> int:
        """How many requests have events to come."""
        return sum(session.pending() for session in self._sessions)

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request where the fewest are pending; the next step of that session checks it."""
        min(self._sessions, key=Session.pending).submit(request)

    def cancel(self, request_id: str) -> None:
        """Ends a pending request."""
        for session in self._sessions:
            session.cancel(request_id)

    def step(self) -> list[Event]:
        """Begins a pass of each session that has none under way and a request left, and ends the oldest pass."""
        events: list[Event] = []
        try:
            for session in self._sessions:
                if not session.in_flight():
                    events += session.begin()
                    if session.in_flight():
                        self._in_flight.append(session)
            if self._in_flight:
                events += self._in_flight.popleft().finish()
        except BaseException:
            self.close()
            raise
        return events

    def close(self) -> None:
        """Drops all requests and frees their KV blocks. Idempotent."""
        self._in_flight.clear()
        for session in self._sessions:
            session.close()


class Sessions(Protocol):
    """What `run` needs of a session, or of several."""

    def submit(self, request: GenerationRequest) -> None: ...

    def pending(self) -> int: ...

    def clock(self) -> float: ...

    def step(self) -> list[Event]: ...


def run(session: Sessions, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
    """Submits each request when it arrives; yields its result when it is done. Raises for one that is refused."""
    to_come = deque(sorted(requests, key=lambda request: request.arrival_s))  # equal arrivals keep their order
    while to_come or session.pending():
        while to_come and to_come[0].arrival_s <= session.clock():
            session.submit(to_come.popleft())
        if not session.pending():
            time.sleep(max(0.0, to_come[0].arrival_s - session.clock()))
            continue
        for event in session.step():
            match event:
                case FinishedEvent(result):
                    yield result
                case RefusedEvent(_, reason, kind):
                    raise (HarnessError if kind == "invalid" else InfeasibleError)(reason)
