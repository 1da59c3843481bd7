"""Drives an engine with requests that arrive by the clock, whatever the engine does, and keeps what clients saw.

Real engines: a thread of its own hands each request over when it is due, so a long pass delays none (no coordinated
omission; Tene, "How NOT to Measure Latency"). Latencies count from when a request was due. Simulated engines have a
clock of their own: there one thread sends what is due between passes, and idle time is skipped.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.api import (
    Capabilities,
    EventSink,
    FinishedEvent,
    GenerationResult,
    HarnessError,
    OnlineEngine,
    RefusedEvent,
    ServedRequest,
)
from harness.run.answers import check
from harness.run.load_plan import LoadPlan, Session

#: Answers at the first look at whether they tell enough; at each further one they are twice as many. A look after every
#: answer would often find an interval that is narrow by chance.
_FIRST_LOOK = 100
#: Seconds between looks at whether the load is over, while nothing else happens.
_LOOK_S = 0.05


@dataclass
class LoadTest:
    """One load on a loaded engine that is idle. `vocab`: of its model. `phase`: for progress.

    `deadline_s`: seconds after which whatever is pending is cancelled; None waits for all answers. `is_enough`: whether
    the first requests that were due, as many as have answers without a gap, tell enough: then arrivals end.
    """

    engine: OnlineEngine
    capabilities: Capabilities
    plan: LoadPlan
    vocab: int
    deadline_s: float | None
    on_event: EventSink
    phase: str
    expected: int
    is_enough: Callable[[Sequence[ServedRequest]], bool] | None = None

    def run(self) -> list[ServedRequest]:
        """What became of every request that was sent, in the order of their ends. Raises HarnessError for an engine
        that does not do the work, and what the engine raises."""
        self._served: list[ServedRequest] = []
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Condition()
        self._next_look = _FIRST_LOOK
        self._over = False
        if self.capabilities.simulated:
            self._simulated()
        else:
            self._real()
        return self._served

    def _simulated(self) -> None:
        skipped = -self.engine.clock()
        while not self.plan.done and not self._late(now := self.engine.clock() + skipped):
            due = self.plan.next_due()
            if due is not None and due > now and not self.engine.pending():
                skipped = due - self.engine.clock()
                now = due
            while due is not None and due <= now:
                self._send(due, lambda session: self.engine.submit(session.request()))
                due = self.plan.next_due()
            self._take(skipped)
        self._cancel(skipped)

    def _real(self) -> None:
        """The engine's side. The generator's thread sends; this thread alone calls an engine in this process, while a
        server may be sent a request at any time."""
        outbox = queue.SimpleQueue[Session | None]()
        began = time.monotonic()
        offset = began - self.engine.clock()
        failure: list[BaseException] = []

        def hand_over(session: Session) -> None:
            if self.capabilities.remote:
                self.engine.submit(session.request())
                outbox.put(None)
            else:
                outbox.put(session)

        def generate() -> None:
            try:
                self._generate(lambda: time.monotonic() - began, hand_over)
            except BaseException as exc:
                failure.append(exc)

        generator = threading.Thread(target=generate, name="load generator", daemon=True)
        generator.start()
        try:
            while not failure and not self._late(time.monotonic() - began):
                with self._lock:
                    if self.plan.done and outbox.empty():
                        break
                self._receive(outbox)
                self._take(offset - began)
        finally:
            with self._lock:
                self._over = True
                self._lock.notify()
            generator.join()
        if failure:
            raise failure[0]
        self._cancel(offset - began)

    def _generate(self, now: Callable[[], float], hand_over: Callable[[Session], None]) -> None:
        """Sends each request when it is due, until the load is over."""
        with self._lock:
            while not self._over:
                due = self.plan.next_due()
                if due is None or due > (at := now()):
                    self._lock.wait(None if due is None else due - at)
                    continue
                self._send(at, hand_over)

    def _receive(self, outbox: "queue.SimpleQueue[Session | None]") -> None:
        """Submits what was handed over; waits for it where the engine has nothing else to do."""
        wait = not self.engine.pending()
        try:
            while True:
                session = outbox.get(wait, _LOOK_S)
                wait = False
                if session is not None:
                    self.engine.submit(session.request())
        except queue.Empty:
            return

    def _send(self, now: float, hand_over: Callable[[Session], None]) -> None:
        session = self.plan.take(now)
        self._sessions[session.id] = session
        hand_over(session)
        self.plan.sent(session)

    def _take(self, offset: float) -> None:
        """Runs a pass and keeps its results; `offset` brings the engine's times to seconds since the load began."""
        events = self.engine.step()
        with self._lock:
            for event in events:
                if isinstance(event, FinishedEvent):
                    self._finished(event.result, offset)
                elif isinstance(event, RefusedEvent):
                    session = self._asked(event.id)
                    self._keep(session, ServedRequest(
                        session.id, session.due_s, session.sent_s, len(session.request().prompt), outcome="refused",
                        reason=event.reason, round=session.round,
                    ))  # fmt: skip
                    self.plan.dropped(session, max(session.sent_s, self.engine.clock() + offset))
            self._lock.notify()
            looks = self.is_enough is not None and len(self._served) >= self._next_look
            first = min((session.due_s for session in self._sessions.values()), default=math.inf) if looks else 0.0
        if looks:
            self._look(first, offset)

    def _look(self, first: float, offset: float) -> None:
        """Ends arrivals where the requests that were due before `first`, the first that is pending, tell enough; those
        that are answered beside slower ones would make a rate look faster. Without the lock, which delays requests that
        are due: this thread alone adds to what it reads."""
        assert self.is_enough is not None
        self._next_look = 2 * len(self._served)
        if self.is_enough(sorted((r for r in self._served if r.due_s < first), key=lambda r: r.due_s)):
            self.is_enough = None
            with self._lock:
                self.plan.end(self.engine.clock() + offset)
                self._lock.notify()

    def _finished(self, result: GenerationResult, offset: float) -> None:
        session = self._asked(result.id)
        times = tuple(round(t + offset, 6) for t in result.token_times_s)
        cancelled = result.finish_reason == "cancelled"
        start_s, digest = None, ""
        if not self.capabilities.remote and not cancelled:
            trace = check([session.request()], [result], self.vocab)[0]
            start_s, digest = round(result.start_s + offset, 6), trace.digest
        self._keep(session, ServedRequest(
            session.id, round(session.due_s, 6), round(session.sent_s, 6), result.prompt_tokens, times, start_s,
            "unfinished" if cancelled else "ok", round=session.round, digest=digest,
            asked_tokens=session.conversation.turns[session.round].max_tokens, cached_tokens=result.cached_tokens,
        ))  # fmt: skip
        if cancelled:
            self.plan.dropped(session, session.sent_s)
        else:
            self.plan.answered(session, times[-1], result.tokens)

    def _keep(self, session: Session, served: ServedRequest) -> None:
        del self._sessions[session.id]
        self._served.append(served)
        self.on_event(self.phase, len(self._served), max(self.expected, len(self._served)))

    def _asked(self, request_id: str) -> Session:
        if request_id not in self._sessions:
            raise HarnessError(f"check failed: {request_id} was never asked for, or is answered twice")
        return self._sessions[request_id]

    def _late(self, now: float) -> bool:
        return self.deadline_s is not None and now >= self.deadline_s

    def _cancel(self, offset: float) -> None:
        """Ends what is pending, so that the engine is idle afterwards."""
        for request_id in list(self._sessions):
            self.engine.cancel(request_id)
        while self.engine.pending():
            self._take(offset)
        for session in list(self._sessions.values()):  # handed over and never submitted
            self._keep(session, ServedRequest(session.id, session.due_s, session.sent_s, len(session.request().prompt),
                                              outcome="unfinished", round=session.round))  # fmt: skip


def lags_of(served: Sequence[ServedRequest]) -> list[float]:
    """How late the generator sent each request, in seconds."""
    return [request.sent_s - request.due_s for request in served]
