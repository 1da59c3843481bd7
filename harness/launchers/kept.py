"""Answers to a task that could not be judged: kept beside the log, and judged when the run goes on."""

import contextlib
import json
from pathlib import Path

from harness.api import HarnessError, LaunchRequest, LaunchResult, from_json, to_json
from harness.common.files import file_digest, replace_with


class KeptAnswers:
    """The result of one launch of a task's cell, valid for this cell and these questions only."""

    def __init__(self, request: LaunchRequest, questions: Path | None) -> None:
        self._path = request.exchange.log.with_suffix(f".{request.repeat}.answers.json")
        self._key = [request.spec.fingerprint(), file_digest(questions) if questions else None]

    def read(self) -> LaunchResult | None:
        """The launch that was kept, None where there is none for this key."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, HarnessError):
            content = json.loads(self._path.read_text())
            if content["key"] == self._key:
                return from_json(LaunchResult, content["launch"])
        return None

    def write(self, launch: LaunchResult) -> None:
        """Keeps a launch. A disk that cannot take it does not fail the run."""
        with contextlib.suppress(OSError):
            replace_with(self._path, json.dumps({"key": self._key, "launch": to_json(launch)}))

    def drop(self) -> None:
        self._path.unlink(missing_ok=True)
