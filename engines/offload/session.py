"""Requests that share passes: they come and are cancelled between passes, and leave as events."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from engines.common.json_schema import Constraint, constraints
from engines.common.requests import decoder
from engines.offload.admission import AverageLength
from engines.offload.model_runner import ModelRunner
from engines.offload.prefill_budget import make_scheduler
from engines.offload.scheduled_pass import ScheduledPass, Share
from engines.offload.scheduler import Scheduler
from engines.offload.sequence import Generation
from harness.api import (
    Event,
    FinishedEvent,
    GenerationRequest,
    GenerationResult,
    HarnessError,
    InfeasibleError,
    RefusedEvent,
    TokenEvent,
)

#: Rows of logits with which any prompt gets ahead, though none of its rows is computed alone.
_FEW_LOGITS = 3


class Session:
    """The requests that one scheduler serves, by the methods of harness.api.OnlineEngine; it lives on the KV blocks of
    a `share` and the passes of `runner`.

    `budget`: prompt tokens of a pass beside so many decode rows. `average`: the length by which requests are admitted;
    None for the longest that each may have.
    """

    def __init__(
        self, runner: ModelRunner, share: Share, budget: Callable[[int], int], average: AverageLength | None = None
    ) -> None:
        loaded = runner.loaded
        self._runner = runner
        self._scheduler: Scheduler[Generation] = make_scheduler(
            [], share.blocks, share.policy, share.plan, budget, share.plan.chunk,
            max_logits=max(_FEW_LOGITS, loaded.plan.most_logits(loaded.policy)), average=average,
        )  # fmt: skip
        self._scheduled: ScheduledPass[Generation] | None = None  # the pass that was begun and has not ended
        self._began = time.monotonic()
        self._submitted: list[GenerationRequest] = []  # since the last step
        self._accepted: dict[str, Generation] = {}
        self._cancelled: dict[str, None] = {}  # ids, in order
        # loaded when the first stop string, and the first schema, needs it
        self._decode: Callable[[Sequence[int]], str] | None = None
        self._constraints: Callable[[str], Constraint] | None = None

    def clock(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self._began

    @property
    def running(self) -> int:
        """How many requests hold KV blocks; the other pending ones wait."""
        return len(self._scheduler.running)

    def pending(self) -> int:
        """How many requests have events to come."""
        return len(self._submitted) + len(self._accepted)

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request; the next step checks it."""
        self._submitted.append(request)

    def cancel(self, request_id: str) -> None:
        """Ends a pending request with the next step."""
        if request_id in self._accepted or any(request.id == request_id for request in self._submitted):
            self._cancelled[request_id] = None

    def step(self) -> list[Event]:
        """Ends what was cancelled, checks what was submitted, and runs a pass if a request is left.

        A pass that fails ends the session's requests.
        """
        return [*self.begin(), *self.finish()]

    def in_flight(self) -> bool:
        """Whether a pass was begun and has not ended."""
        return self._scheduled is not None

    def begin(self) -> list[Event]:
        """The first half of a step: to the point where a pass is under way, if a request is left."""
        events: list[Event] = [*self._end_cancelled(), *self._accept_submitted()]
        if self._accepted:
            try:
                self._scheduled = self._runner.begin_pass(self._scheduler, self.clock)
            except BaseException:
                self.close()
                raise
        else:
            self._runner.loaded.timeline.rest()
        return events

    def finish(self) -> list[Event]:
        """The second half: ends the pass that was begun, if any."""
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is None:
            return []
        try:
            advanced = self._runner.end_pass(scheduled, self.clock)
        except BaseException:
            self.close()
            raise
        events: list[Event] = []
        for sequence, done in advanced:
            request = sequence.request
            events.append(TokenEvent(request.id, sequence.tokens[-1], sequence.times[-1], sequence.last_logprob))
            if done:
                del self._accepted[request.id]
                self._cancelled.pop(request.id, None)  # too late: a later request of that name is another
                events.append(FinishedEvent(sequence.result()))
        return events

    def close(self) -> None:
        """Drops all requests and frees their KV blocks. Idempotent."""
        self._scheduled = None
        for sequence in self._accepted.values():
            self._scheduler.finish(sequence)
        self._accepted.clear()
        self._submitted.clear()
        self._cancelled.clear()

    def _end_cancelled(self) -> Iterator[Event]:
        for request_id in [i for i in self._cancelled if i in self._accepted]:
            del self._cancelled[request_id]
            sequence = self._accepted.pop(request_id)
            self._scheduler.finish(sequence)
            yield FinishedEvent(self._cancelled_result(sequence))

    def _accept_submitted(self) -> Iterator[Event]:
        submitted, self._submitted = self._submitted, []
        for request in submitted:
            if request.id in self._cancelled:
                del self._cancelled[request.id]
                yield FinishedEvent(self._cancelled_result(Generation(request, (), None)))
                continue
            try:
                sequence = self._checked(request)
            except InfeasibleError as error:
                yield RefusedEvent(request.id, str(error), "infeasible")
            except HarnessError as error:
                yield RefusedEvent(request.id, str(error), "invalid")
            else:
                self._accepted[request.id] = sequence
                self._scheduler.submit(sequence)

    def _checked(self, request: GenerationRequest) -> Generation:
        loaded = self._runner.loaded
        if request.id in self._accepted:
            raise HarnessError(f"request {request.id}: another one with this id is not done; give each its own")
        self._runner.require_request(request)
        if self._decode is None:
            self._decode = decoder(loaded.model.path, [request])
        constraint = None
        if (schema := request.sampling.json_schema) is not None:
            if self._constraints is None:
                folder, vocab = Path(loaded.model.path), loaded.model.shape.vocab
                self._constraints = constraints(folder, vocab, loaded.meta_model.eos)
            constraint = self._constraints(schema)
        return Generation(replace(request, arrival_s=0.0), loaded.meta_model.eos, self._decode, constraint)

    def _cancelled_result(self, sequence: Generation) -> GenerationResult:
        if sequence.start_s < 0:
            sequence.start_s = self.clock()
        return sequence.result(cancelled=True)
