"""Answers to a task that could not be judged: kept beside the log, and judged when the run goes on."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from harness.api import HarnessError, LaunchRequest, RunRecord, from_json, to_json
from harness.common.files import file_digest, replace_with


class KeptAnswers:
    """Of one launch, by its cell and the very questions: others are not answered by them."""

    def __init__(self, request: LaunchRequest, questions: Path | None) -> None:
        self._path = request.log.with_suffix(f".{request.repeat}.answers.json")
        self._key = [request.spec.fingerprint(), file_digest(questions) if questions else None]

    def read(self) -> tuple[RunRecord, object] | None:
        """The launch that they are of, and they."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, HarnessError):
            found = json.loads(self._path.read_text())
            if found["key"] == self._key:
                return from_json(RunRecord, found["record"]), found["answers"]
        return None

    def write(self, record: RunRecord, answers: object) -> None:
        """Keeps them, if the disk takes them: a run does not fail for it."""
        with contextlib.suppress(OSError):
            replace_with(self._path, json.dumps({"key": self._key, "record": to_json(record), "answers": answers}))

    def drop(self) -> None:
        self._path.unlink(missing_ok=True)
