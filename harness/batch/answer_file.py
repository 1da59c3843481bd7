"""The output of a batch job: one line per input line, kept whole across interruptions, of one model only."""

import json
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from harness.api import HarnessError
from harness.common.files import os_errors, replacing, sync_folder
from harness.common.line_file import LineFile
from harness.common.locks import locked
from harness.common.regular_file import lines_of, open_regular, parse_json

#: The first bytes of every line that a batch job writes.
_BEGINNING = b'{"line":'
_ADVICE = "choose another --output, or --fresh to set it aside"


@dataclass(frozen=True)
class Answered:
    """A line of the output, an answer or a refusal; `digest` identifies the input line that it belongs to."""

    digest: str
    refused: bool


class AnswerStream:
    """Shows answers instead of keeping them, by `show`: nothing is resumed."""

    def __init__(self, model: str, show: Callable[[Mapping[str, Any]], None]) -> None:
        self._model = model
        self._show = show
        self.answered: dict[int, Answered] = {}

    def close(self) -> None:
        """There is nothing to release."""

    def write(self, row: Mapping[str, Any], digest: str) -> None:
        """Shows an answer to the input line with this digest."""
        self._show({**row, "line_digest": digest, "model_digest": self._model})

    def remove(self, lines: Collection[int]) -> None:
        """There is nothing to remove."""


class AnswerFile:
    """Appends answers to `path`, for one process at a time; `answered` holds the lines it has so far, by number.

    `model` is a digest of the model that answers. A file of another model's answers, or of anything else, is refused
    and left as it is. `fresh` sets an earlier file aside. With `dry_run` nothing is created, locked or written.
    Raises HarnessError for a file that cannot be read, written or locked.
    """

    def __init__(self, path: Path, model: str, fresh: bool, dry_run: bool = False) -> None:
        self._file = LineFile(path)
        self._model = model
        self._fresh = fresh
        self._lock: IO[bytes] | None = None
        self.answered: dict[int, Answered] = {}
        if dry_run:
            self.answered = {} if fresh else _answered(path, model)
            return
        try:
            self._open(path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.close()

    def write(self, row: Mapping[str, Any], digest: str) -> None:
        """Appends an answer to the input line with this digest, and syncs it."""
        self._refuse_if_moved()
        row = {**row, "line_digest": digest, "model_digest": self._model}
        with self._write_errors():
            self._file.append(_encoded(row))

    def remove(self, lines: Collection[int]) -> None:
        """Removes the answers of `lines`, all at once or not at all."""
        if not lines:
            return
        self._refuse_if_moved()
        path = self._file.path
        with self._write_errors():
            with open_regular(path) as old, replacing(path) as new:
                new.writelines(line for line in lines_of(old) if parse_json(line)["line"] not in lines)
                lock = os.fdopen(os.dup(new.fileno()), "ab")  # it keeps the lock of the file that is now at `path`
            self.close()
            self._lock = lock
            sync_folder(path.parent)  # what is appended from now on must not be lost with the rename
            self._file.mend()
        self.answered = {number: answer for number, answer in self.answered.items() if number not in lines}

    def _open(self, path: Path) -> None:
        with os_errors(f"cannot write {path}", "choose another --output"):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and (not path.is_file() or _is_stdout(path)):
                raise HarnessError(f"{path} is not a regular file; choose another --output")
            self._lock_file(path)
            if self._fresh and path.stat().st_size:
                self._file.set_aside()
                self._lock_file(path)
            self.answered = _answered(path, self._model)
            self._file.mend()

    def _lock_file(self, path: Path) -> None:
        """Locks the file at `path` and releases the one locked before."""
        lock = locked(path, f"{path} is being written by another harness; wait for it", follow=True)
        self.close()
        self._lock = lock

    def _refuse_if_moved(self) -> None:
        """Raises HarnessError if the file was moved or removed meanwhile: another job may write one in its place."""
        assert self._lock is not None, "a dry run writes nothing"
        path = self._file.path
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(self._lock.fileno())):
            raise HarnessError(f"{path} was moved or removed while the job was running; the job ends here")

    def _write_errors(self) -> AbstractContextManager[None]:
        again = f"run the same command again{' without --fresh' if self._fresh else ''} to resume"
        return os_errors(f"cannot write {self._file.path}", f"free space, then {again}")


def _answered(path: Path, model: str) -> dict[int, Answered]:
    """The lines of a file of answers, by number; a truncated last line does not count.

    Raises HarnessError for a file of anything else, or of another model's answers.
    """
    answers: dict[int, Answered] = {}
    if not path.exists():
        return answers
    with os_errors(f"cannot read {path}", "choose another --output"), open_regular(path) as file:
        for number, line in enumerate(lines_of(file), 1):
            begun = line.rstrip(b"\0")  # after a power cut a file may end in zeros
            if not line.endswith(b"\n") and begun.startswith(_BEGINNING[: len(begun)]):
                break
            try:
                row = parse_json(line)
                answers[int(row["line"])] = Answered(row["line_digest"], row["error"] is not None)
                digest = row["model_digest"]
            except (ValueError, KeyError, TypeError):
                raise HarnessError(f"{path}:{number} is not an answer of a batch job; {_ADVICE}") from None
            if digest != model:
                raise HarnessError(f"{path} holds answers of another model, or of other bits; {_ADVICE}")
    return answers


def _encoded(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a lone surrogate, which only JSON's escapes can hold
        return json.dumps(row, separators=(",", ":")).encode()


def _is_stdout(path: Path) -> bool:
    """Whether this process prints to the file: then answers and summary would overwrite each other."""
    with suppress(OSError):
        return os.path.samestat(path.stat(), os.fstat(1))
    return False
