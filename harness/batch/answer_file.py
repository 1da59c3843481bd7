"""The output of a batch job: a line for each input line, and the model that gave them, across interruptions."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from harness.api import HarnessError
from harness.common.line_file import LineFile

#: How every line of ours begins.
_BEGINNING = b'{"line":'
_ADVICE = "choose another --output, or --fresh to set it aside"


@dataclass(frozen=True)
class Answered:
    """A line that has its answer, or was refused; `asked` is a digest of what it asked for."""

    asked: str
    refused: bool


class AnswerFile:
    """Appends answers to `path`, for one process at a time. `done`: what it answers already, by number of the line.

    `model` is a digest of who answers: a file of another model's answers is refused, and so is, untouched, one of
    anything else. Raises HarnessError for what cannot be read, written or locked.
    """

    def __init__(self, path: Path, model: str, fresh: bool) -> None:
        self._file = LineFile(path)
        self._model = model
        self._fresh = fresh
        self._lock: IO[bytes] | None = None
        self.done: dict[int, Answered] = {}

    def __enter__(self) -> AnswerFile:
        try:
            self._open(self._file.path)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()

    def write(self, row: Mapping[str, Any], asked: str) -> None:
        """Adds an answer durably, and what it answers."""
        self._refuse_if_moved()
        row = {**row, "line_digest": asked, "model_digest": self._model}
        try:
            self._file.append(_encoded(row))
        except OSError as exc:
            raise self._failed(exc) from exc

    def forget(self, lines: Collection[int]) -> None:
        """Takes the answers of `lines` out, all at once or not at all."""
        if not lines:
            return
        self._refuse_if_moved()
        path = self._file.path
        temporary = path.with_name(f".{path.name}.new-{os.getpid()}")
        try:
            with path.open("rb") as old, temporary.open("wb") as new:
                new.writelines(line for line in old if json.loads(line)["line"] not in lines)
                new.flush()
                os.fsync(new.fileno())
            self._take(temporary)
            temporary.replace(path)
        except OSError as exc:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise self._failed(exc) from exc
        self.done = {number: answer for number, answer in self.done.items() if number not in lines}

    def _open(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and (not path.is_file() or _is_stdout(path)):
                raise HarnessError(f"{path} is not a regular file; choose another --output")
            self._take(path)
            if self._fresh and path.stat().st_size:
                self._file.set_aside()
                self._take(path)
            self.done = answered(path, self._model)
            self._file.mend()
        except OSError as exc:
            raise HarnessError(f"cannot write {path}: {exc.strerror or exc}; choose another --output") from exc

    def _take(self, path: Path) -> None:
        """Locks the file at `path`, in place of one that was locked before."""
        lock = path.open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise HarnessError(f"{path} is being written by another harness; wait for it") from None
        if self._lock is not None:
            self._lock.close()
        self._lock = lock

    def _refuse_if_moved(self) -> None:
        """Raises HarnessError where the file was moved or removed under us: another job may write one in its place."""
        assert self._lock is not None, "entered"
        path = self._file.path
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(self._lock.fileno())):
            raise HarnessError(f"{path} was moved or removed while the job was running; the job ends here")

    def _failed(self, exc: OSError) -> HarnessError:
        return HarnessError(
            f"cannot write {self._file.path}: {exc.strerror or exc}; "
            f"free space, then run the same command again{' without --fresh' if self._fresh else ''} to go on"
        )


def answered(path: Path, model: str) -> dict[int, Answered]:
    """By number the lines that a file of answers holds; a truncated last one does not count.

    Raises HarnessError for a file of anything else, or of another model's answers.
    """
    done: dict[int, Answered] = {}
    if not path.exists():
        return done
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and line.startswith(_BEGINNING[: len(line)]):
                    break
                try:
                    row = json.loads(line)
                    done[int(row["line"])] = Answered(row["line_digest"], row["error"] is not None)
                    digest = row["model_digest"]
                except (ValueError, KeyError, TypeError, RecursionError):
                    raise HarnessError(f"{path}:{number} is no answer of a batch job; {_ADVICE}") from None
                if digest != model:
                    raise HarnessError(f"{path} holds answers of another model; {_ADVICE}")
    except OSError as exc:
        raise HarnessError(f"cannot read {path}: {exc.strerror or exc}; choose another --output") from exc
    return done


def _encoded(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only JSON's escapes can hold
        return json.dumps(row, separators=(",", ":")).encode()


def _is_stdout(path: Path) -> bool:
    """Where answers and summary would overwrite each other."""
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(1))
    return False
