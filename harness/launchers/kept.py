"""Answers to a task that could not be judged: kept beside the log, and judged when the run goes on."""

import contextlib
import json
from pathlib import Path

from harness.api import HarnessError, LaunchRequest, LaunchResult, from_json, to_json
from harness.common.files import file_digest, inside, replace_with
from harness.common.regular_file import read_json


class KeptAnswers:
    """The result of one launch of a task's cell, valid for this cell and these questions only."""

    def __init__(self, request: LaunchRequest, questions: Path | None) -> None:
        log = request.exchange.log
        self._path = inside(log.parent, f"{log.stem}.{request.repeat}.answers.json")
        self._key = [request.spec.fingerprint(), file_digest(questions) if questions else None]

    def read(self) -> LaunchResult | None:
        """The launch that was kept, None where there is none for this key."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, HarnessError):
            content = read_json(self._path)
            if content["key"] == self._key:
                return from_json(LaunchResult, content["launch"])
        return None

    def write(self, launch: LaunchResult) -> None:
        """Keeps a launch. A disk that cannot take it does not fail the run."""
        with contextlib.suppress(OSError):
            replace_with(self._path, json.dumps({"key": self._key, "launch": to_json(launch)}))

    def drop(self) -> None:
        self._path.unlink(missing_ok=True)
