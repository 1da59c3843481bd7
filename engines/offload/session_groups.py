"""Sessions whose passes are under way at the same time, as one session."""

import time
from collections import deque
from collections.abc import Iterator, Sequence

from engines.offload.session import Session, run
from harness.api import Event, GenerationRequest, GenerationResult


class SessionGroups:
    """Requests divided over `sessions`, by the methods of harness.api.OnlineEngine; each has its own KV blocks."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._sessions = sessions
        self._began = time.monotonic()
        for session in sessions:
            session.begin_clock(self._began)
        self._flying: deque[Session] = deque()

    def clock(self) -> float:
        """Seconds since the sessions began."""
        return time.monotonic() - self._began

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
                if not session.flying():
                    events += session.begin()
                    if session.flying():
                        self._flying.append(session)
            if self._flying:
                events += self._flying.popleft().finish()
        except BaseException:
            self.close()
            raise
        return events

    def run(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """See session.run."""
        return run(self, requests)

    def close(self) -> None:
        """Drops all requests and frees their KV blocks. Idempotent."""
        self._flying.clear()
        for session in self._sessions:
            session.close()
