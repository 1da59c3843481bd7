"""Runs batches one after the other, beside the requests of other clients: their lines as `harness generate` answers a
file, the engine's passes shared with everybody."""

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from harness.api import (
    Event,
    FinishedEvent,
    GenerationRequest,
    GenerationResult,
    HarnessError,
    RefusedEvent,
    TokenEvent,
    first_line,
)
from harness.batch.answer_file import AnswerFile
from harness.batch.generate import write_answers, write_refused
from harness.batch.input import Ready, read
from harness.batch.job import BatchJob
from harness.common.files import os_errors
from harness.common.regular_file import lines_of, open_regular, parse_json
from harness.serve.batch_store import Batch, BatchStore, Counts, Status
from harness.serve.engine_loop import Deliver, EngineFailure
from harness.serve.file_store import FileStore
from harness.serve.requests import no_model
from harness.serve.served import Served

#: How long a batch waits before it looks again whether it is cancelled, or whether there is room for its requests.
_LOOK_S = 0.2


#: Gives the digest of all that decides a model's answers, and tells how far it has read the model: bytes done, of all.
Identity = Callable[[Callable[[int, int], None]], str]


class _InterruptedError(Exception):
    """The server ends; the batch goes on when it is started again."""


class BatchRunner:
    """Runs the batches of `store` that are of the model that is `served`, in the order in which they came.

    `window`: how many of a batch's requests are pending at a time, so that other clients' need not wait behind all.
    """

    def __init__(
        self, store: BatchStore, files: FileStore, served: Served, window: int, identity: Identity,
        note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._store, self._files, self._served, self._window = store, files, served, window
        self._make_identity, self._note = identity, note
        self._loop = served.loop
        self._closing = threading.Event()
        self._taking = threading.Lock()  # who decides what becomes of a batch that does not run
        self._current: str | None = None  # the batch that runs
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)

    def start(self) -> None:
        """Goes on with what an earlier server left."""
        for batch in self._store.all():
            if not batch.ended and batch.model == self._served.name:
                self.submit(batch)
        self._thread.start()

    def submit(self, batch: Batch) -> None:
        """Queues a batch of the store."""
        self._queue.put(batch.id)

    def cancel(self, id_: str) -> None:
        """Ends a batch that is to be cancelled, at once unless it runs. Raises HarnessError if it cannot be written."""
        with self._taking:
            if self._current != id_ and not self._batch(id_).ended:
                self._finish(id_)

    def close(self) -> None:
        """Ends the thread; the batch that runs goes on when its server is started again. Idempotent."""
        self._closing.set()
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    @cached_property
    def _identity(self) -> str:
        return self._make_identity(lambda done, total: self._go_on())

    def _run(self) -> None:
        while (id_ := self._queue.get()) is not None and not self._closing.is_set():
            with self._taking:
                if self._batch(id_).ended:  # it was cancelled before its turn
                    continue
                self._current = id_
            try:
                self._run_batch(id_)
            except _InterruptedError:
                return
            except Exception as exc:
                reason = str(exc) if isinstance(exc, HarnessError) else f"{type(exc).__name__}: {first_line(exc)}"
                self._end(id_, "failed", error=reason)
            finally:
                self._current = None

    def _batch(self, id_: str) -> Batch:
        batch = self._store.get(id_)
        assert batch is not None
        return batch

    def _go_on(self) -> None:
        if self._closing.is_set():
            raise _InterruptedError

    def _run_batch(self, id_: str) -> None:
        """Answers the lines of a batch that have no answer yet. Raises HarnessError where it fails."""
        batch = self._batch(id_)
        if batch.status == "validating":
            self._note(f"{id_} begins")
        served, settings = self._served, self._served.settings
        job = BatchJob(
            settings.model, settings.engine, settings.memory, settings.overrides,
            self._files.content(batch.input_file_id), self._store.answers(id_), settings.cache, batch.max_tokens,
        )  # fmt: skip
        stopped = self._stopped(id_)
        if not stopped():
            progress = _BatchProgress(self._store, id_, self._go_on)
            with closing(AnswerFile(job.output, self._identity, fresh=False)) as output:
                lines = read(job, served.shape, served.text, output.answered, progress)
                lines.refuse(lambda item: self._refusal(item, batch))
                settled, refused = len(lines.settled), len(lines.refused)
                if not lines.ready and not settled and not refused:
                    raise HarnessError("the file holds no requests")
                failed = refused + sum(answer.refused for answer in lines.settled.values())
                progress.before = Counts(len(lines.ready) + settled + refused, settled + refused - failed, failed)
                self._store.change(id_, "in_progress", _now(), counts=progress.before)
                output.remove(output.answered.keys() - lines.settled.keys())  # refused once, and tried again
                write_refused(lines.refused, output)
                results = self._results(id_, lines.requests, stopped)
                write_answers(results, lines, served.name, served.text, output, progress)
        if self._closing.is_set() or self._loop.closed:
            raise _InterruptedError
        self._finish(id_)

    def _finish(self, id_: str) -> None:
        batch = self._store.change(id_, "finalizing", _now())
        self._end(id_, "cancelled" if batch.status == "cancelling" else "completed", **self._outcome(batch))

    def _end(self, id_: str, status: Status, **changes: Any) -> None:
        """Ends a batch; one that failed with files of what it had answered."""
        try:
            if status == "failed":
                changes |= self._outcome(self._batch(id_))
            batch = self._store.change(id_, status, _now(), **changes)
        except (
            HarnessError,
            OSError,
        ) as exc:  # a full disk: clients are told, and a server that is started again tries again
            self._note(f"{id_}: {exc}")
            batch = self._store.change(id_, status, _now(), kept=False, **changes)
        else:
            with suppress(OSError):
                self._store.answers(id_).unlink(missing_ok=True)
        counts, why = batch.counts, f": {batch.error}" if batch.error else ""
        self._note(f"{id_} {batch.status}, {counts.completed} lines answered, {counts.failed} refused{why}")

    def _outcome(self, batch: Batch) -> dict[str, Any]:
        """Files of a batch's answers and of its refusals, as far as it came, and how many there are."""
        counts = {refused: sum(1 for _ in self._rows(batch, refused)) for refused in (False, True)}
        done = Counts(max(batch.counts.total, sum(counts.values())), counts[False], counts[True])
        outcome: dict[str, Any] = {"counts": done}
        for refused, key, what in ((False, "output_file_id", "output"), (True, "error_file_id", "errors")):
            if counts[refused]:
                rows = (json.dumps(row).encode() + b"\n" for row in self._rows(batch, refused))
                # the same name again where a killed server had written the file
                id_ = f"file-{batch.id.removeprefix('batch_')}-{what}"
                outcome[key] = self._files.add(f"{batch.id}_{what}.jsonl", "batch_output", rows, id_).id
        return outcome

    def _rows(self, batch: Batch, refused: bool) -> Iterator[dict[str, Any]]:
        """The answers or the refusals of a batch so far, as lines of OpenAI's format. Raises HarnessError where they
        cannot be read."""
        number = batch.id.removeprefix("batch_")
        path = self._store.answers(batch.id)
        if not path.exists():
            return
        kind = "chatcmpl" if batch.endpoint.endswith("/chat/completions") else "cmpl"
        with os_errors(f"cannot read {path}"), open_regular(path) as file:
            for number_of_row, raw in enumerate(lines_of(file), 1):
                row = _row(raw, f"{path} line {number_of_row}")
                if (row["error"] is not None) is not refused:
                    continue
                name, response = f"{number}-{row['line']}", row["response"]
                if response is not None:
                    body = {"id": f"{kind}-{name}", "created": batch.created_at, **response["body"]}
                    response = {**response, "request_id": f"req_{name}", "body": body}
                error = None if row["error"] is None else {**row["error"], "line": row["line"]}
                yield {
                    "id": f"batch_req_{name}", "custom_id": row["custom_id"], "response": response, "error": error,
                }  # fmt: skip

    def _refusal(self, item: Ready, batch: Batch) -> str:
        """Why this server does not run a line that the model could; empty where it does."""
        line = item.line
        if line.model is not None and line.model != self._served.name:
            return no_model(line.model, self._served.name)
        if bool(line.messages) is not batch.endpoint.endswith("/chat/completions"):
            return f"is a {'chat' if line.messages else 'completion'}, and the batch is of {batch.endpoint}"
        if item.tokens > self._served.longest:
            return f"{item.tokens} tokens (prompt and new) exceed the {self._served.longest} that this server holds"
        return ""

    def _stopped(self, id_: str) -> Callable[[], bool]:
        def stopped() -> bool:
            batch = self._store.get(id_)
            return self._closing.is_set() or batch is None or batch.status == "cancelling"

        return stopped

    def _results(
        self, id_: str, requests: Sequence[GenerationRequest], stopped: Callable[[], bool]
    ) -> Iterator[GenerationResult | RefusedEvent]:
        """Results as they come, of requests that are submitted as others end.

        Ends early where it is `stopped` or the server ends.
        """
        events: queue.SimpleQueue[Event | EngineFailure] = queue.SimpleQueue()

        def deliver(event: Event | EngineFailure) -> None:
            if not isinstance(event, TokenEvent):
                events.put(event)

        waiting = deque(requests)
        running: dict[str, str] = {}  # the request's own id by the one in the engine
        try:
            while waiting or running:
                if stopped():
                    break
                if self._loop.closed:  # what is under way still ends
                    waiting.clear()
                while waiting and len(running) < self._window:
                    named = replace(waiting[0], id=f"{id_}:{waiting[0].id}")
                    if not self._submitted(id_, named, deliver):
                        break
                    running[named.id] = waiting.popleft().id
                try:
                    event = events.get(timeout=_LOOK_S)
                except queue.Empty:
                    continue
                match event:
                    case EngineFailure(reason):
                        self._store.change(id_, None, _now(), kept=False, error=reason)
                        raise _InterruptedError
                    case FinishedEvent(result) if result.finish_reason == "cancelled":
                        del running[result.id]  # by a server that ends
                    case FinishedEvent(result):
                        yield replace(result, id=running.pop(result.id))
                    case RefusedEvent(id=name):
                        yield replace(event, id=running.pop(name))
        finally:
            for name in running:
                self._loop.cancel(name)

    def _submitted(self, id_: str, request: GenerationRequest, deliver: Deliver) -> bool:
        """Whether a request of the batch was let in. Raises _InterruptedError where the engine has failed."""
        try:
            return not self._loop.closed and self._loop.submit([(request, deliver)])
        except HarnessError as exc:
            if self._loop.failure:
                self._store.change(id_, None, _now(), kept=False, error=str(exc))
            raise _InterruptedError from exc


class _BatchProgress:
    """Counts the lines of a batch that were answered, for clients that ask; `before`: as its server found it. `go_on`
    raises where the server ends while the file is read."""

    def __init__(self, store: BatchStore, id_: str, go_on: Callable[[], None]) -> None:
        self._store, self._id, self._go_on = store, id_, go_on
        self.before = Counts()

    def note(self, text: str) -> None: ...

    def advance(self, phase: str, done: int, total: int, tokens: int = 0) -> None:
        if phase == "reading":
            self._go_on()
        if phase == "generating":
            counts = replace(self.before, completed=self.before.completed + done)
            self._store.change(self._id, None, _now(), kept=False, counts=counts)


def _row(raw: bytes, where: str) -> dict[str, Any]:
    """A line of an answer file. Raises HarnessError."""
    try:
        row = parse_json(raw)
        return {name: row[name] for name in ("line", "custom_id", "response", "error")}
    except (ValueError, KeyError, TypeError) as exc:
        raise HarnessError(f"{where} is damaged: {first_line(exc)}") from exc


def _now() -> int:
    return int(time.time())
