"""The output of a batch job: a line for each input line, and the model that gave them, across interruptions."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from harness.api import HarnessError
from harness.line_file import LineFile


@dataclass(frozen=True)
class Answered:
    """A line that has its answer, or was refused."""

    id: str | None
    refused: bool


class AnswerFile:
    """Appends answers to `path`, for one process at a time. `done`: what it answers already, by number of the line.

    `model` is a digest of who answers: a file of another model's answers is refused. Raises HarnessError for what
    cannot be read, written or locked.
    """

    def __init__(self, path: Path, model: str, fresh: bool) -> None:
        self._file = LineFile(path)
        self._model = model
        self._fresh = fresh
        self._lock: IO[bytes] | None = None
        self.done: dict[int, Answered] = {}

    def __enter__(self) -> AnswerFile:
        path = self._file.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():
                raise HarnessError(f"{path} is not a regular file; choose another --output")
            if self._fresh:
                self._file.set_aside()
            self._lock = path.open("ab")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise HarnessError(f"{path} is being written by another harness; wait for it") from None
            self._file.mend()
        except OSError as exc:
            raise HarnessError(f"cannot write {path}: {exc.strerror or exc}; choose another --output") from exc
        self.done = answered(path, self._model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds an answer durably."""
        line = json.dumps({**row, "model_digest": self._model}, ensure_ascii=False, separators=(",", ":"))
        try:
            self._file.append(line.encode("utf-8", "replace"))
        except OSError as exc:
            raise HarnessError(
                f"cannot write {self._file.path}: {exc.strerror or exc}; "
                "free space, then run the same command again to go on"
            ) from exc


def answered(path: Path, model: str) -> dict[int, Answered]:
    """By number the lines that a file of answers holds; a truncated last one does not count.

    Raises HarnessError for a file of anything else, or of another model's answers.
    """
    done: dict[int, Answered] = {}
    if not path.exists():
        return done
    advice = "choose another --output, or --fresh to set it aside"
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line)
                    done[int(row["line"])] = Answered(row["custom_id"], row["error"] is not None)
                    digest = row["model_digest"]
                except (ValueError, KeyError, TypeError):
                    raise HarnessError(f"{path}:{number} is no answer of a batch job; {advice}") from None
                if digest != model:
                    raise HarnessError(f"{path} holds answers of another model; {advice}")
    except OSError as exc:
        raise HarnessError(f"cannot read {path}: {exc.strerror or exc}; choose another --output") from exc
    return done
