"""One answer as it comes: its tokens where the engine can tell them, and its text in pieces."""

from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import dataclass

from harness.api import (
    Engine,
    FinishedEvent,
    GenerationRequest,
    GenerationResult,
    HarnessError,
    InfeasibleError,
    OnlineEngine,
    TokenEvent,
)
from harness.batch.format import BatchLine
from harness.batch.job import engine_errors
from harness.batch.session import ModelSession
from harness.batch.texts import GrowingText


@dataclass
class Streamed:
    """The pieces of a request's text, once: together they are its whole text. `result` is there at their end."""

    session: ModelSession
    line: BatchLine
    engine: Engine
    request: GenerationRequest
    result: GenerationResult | None = None

    def pieces(self) -> Generator[str, None, None]:
        """Each piece as soon as no later token can change it. Raises as `stream` does."""
        growing = GrowingText(self.session.text, self.line.sampling)
        with engine_errors(self.session.cell.engine), closing(stream(self.engine, self.request)) as events:
            for event in events:
                if isinstance(event, GenerationResult):
                    self.result = event
                if piece := growing.add(event) if isinstance(event, int) else growing.end(event):
                    yield piece


def stream(engine: Engine, request: GenerationRequest) -> Generator[int | GenerationResult, None, None]:
    """Every token of an answer as it comes, then its result; an engine that is not online gives all at the end.

    Where it is closed early the request is cancelled. Raises HarnessError for a request that the engine refuses,
    InfeasibleError where its memory is too small.
    """
    if not isinstance(engine, OnlineEngine):
        for result in engine.generate([request]):
            yield from result.tokens
            yield result
        return
    engine.submit(request)
    try:
        while engine.pending():
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    yield event.token
                elif isinstance(event, FinishedEvent):
                    yield event.result
                else:
                    raise (InfeasibleError if event.kind == "infeasible" else HarnessError)(event.reason)
    finally:
        with suppress(HarnessError):  # the engine may be closed by now
            engine.cancel(request.id)
            while engine.pending():  # it gives its memory back
                engine.step()
