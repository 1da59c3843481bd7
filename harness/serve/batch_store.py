"""Batches that clients ask for: their records, in a folder that outlives the server."""

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from harness.common.files import os_errors, replace_with
from harness.serve.file_store import FileId
from harness.serve.record_folder import open_records

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled"]
Endpoint = Literal["/v1/completions", "/v1/chat/completions"]

#: How batches end.
ENDED: tuple[Status, ...] = ("completed", "failed", "cancelled")
#: Times that OpenAI's object has, by the status that begins with each.
_TIMES: Mapping[Status, str] = {
    "in_progress": "in_progress_at", "finalizing": "finalizing_at", "completed": "completed_at", "failed": "failed_at",
    "cancelling": "cancelling_at", "cancelled": "cancelled_at",
}  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """Lines of a batch: all, those that were answered, and those that were refused."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Batch:
    """A batch of the file `input_file_id`, of `model` only. Times are seconds of the epoch, by the status that began.

    `max_tokens` is the limit of lines without their own, kept so that a server started with another one goes on as
    before. `error`: why it failed, or empty.
    """

    id: Annotated[str, Field(pattern=r"^batch_[0-9a-f]{24}$")]  # it is part of a file's name
    endpoint: Endpoint
    input_file_id: FileId
    completion_window: str
    model: str
    max_tokens: int
    created_at: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    times: dict[Status, int] = field(default_factory=dict)
    counts: Counts = Counts()
    output_file_id: str | None = None
    error_file_id: str | None = None
    error: str = ""

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def described(self) -> dict[str, Any]:
        """The batch as OpenAI's API has it. It does not expire: a slow machine answers late rather than not."""
        errors = [{"code": "failed", "message": self.error, "line": None, "param": None}]
        return {
            "id": self.id, "object": "batch", "endpoint": self.endpoint, "model": self.model, "status": self.status,
            "input_file_id": self.input_file_id, "completion_window": self.completion_window,
            "output_file_id": self.output_file_id, "error_file_id": self.error_file_id,
            "errors": {"object": "list", "data": errors} if self.error else None,
            "created_at": self.created_at, "expires_at": None, "expired_at": None,
            **{name: self.times.get(status) for status, name in _TIMES.items()},
            "request_counts": asdict(self.counts), "metadata": self.metadata,
        }  # fmt: skip


_BATCH = TypeAdapter(Batch)


class BatchStore:
    """The batches in `folder`, and beside each record the answers that it has so far. Methods may be called from any
    thread. Raises HarnessError where the folder cannot be used."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        records = open_records(folder, "batch_*.json", _BATCH, "a batch", note)
        self._batches = {batch.id: batch for batch in records}
        with os_errors(f"cannot use {folder}", "choose another --files"):
            for batch in records:
                if batch.ended:
                    self.answers(batch.id).unlink(missing_ok=True)

    def all(self) -> list[Batch]:
        """The batches, the oldest first."""
        with self._lock:
            return sorted(self._batches.values(), key=lambda batch: (batch.created_at, batch.id))

    def get(self, id_: str) -> Batch | None:
        """A batch by its id."""
        with self._lock:
            return self._batches.get(id_)

    def answers(self, id_: str) -> Path:
        """Where the answers of a batch are while it runs."""
        return self._folder / f"{id_}.answers.jsonl"

    def put(self, batch: Batch) -> None:
        """Keeps a new batch. Raises HarnessError where it cannot be written."""
        with self._lock:
            self._write(batch)

    def change(self, id_: str, status: Status | None, now: int, kept: bool = True, **changes: Any) -> Batch:
        """Changes a batch; it enters `status` (None: it stays in its own) at `now`. One that has ended or is cancelled
        goes neither back nor on, but to its end. What is not `kept` a killed server forgets.

        Raises HarnessError where it cannot be written; it is then as before.
        """
        with self._lock:
            batch = self._batches[id_]
            if status is not None and not batch.ended and (batch.status != "cancelling" or status in ENDED):
                changes |= {"status": status, "times": {**batch.times, status: now}}
            batch = replace(batch, **changes)
            if kept:
                self._write(batch)
            else:
                self._batches[id_] = batch
            return batch

    def close(self) -> None:
        """Removes the folder where it holds nothing."""
        with suppress(OSError):
            self._folder.rmdir()

    def _write(self, batch: Batch) -> None:
        with os_errors(f"cannot write {self._folder}", "free space, or choose another --files"):
            replace_with(self._folder / f"{batch.id}.json", json.dumps(asdict(batch)) + "\n")
        self._batches[batch.id] = batch
