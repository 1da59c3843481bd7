"""Files that clients upload and fetch: content and description of each, in a folder that outlives the server."""

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, Literal

from pydantic import Field, TypeAdapter

from harness.common.files import os_errors, replace_with, replacing
from harness.serve.record_folder import open_records

Purpose = Literal["batch", "batch_output"]

#: It is part of a file's name.
FileId = Annotated[str, Field(pattern=r"^file-[0-9a-f]{24}(-output|-errors)?$")]
_ADVICE = "free space, or choose another --files"


@dataclass(frozen=True)
class StoredFile:
    """What is known of a file; `created_at` in seconds of the epoch."""

    id: FileId
    filename: str
    purpose: Purpose
    bytes: int
    created_at: int


_STORED = TypeAdapter(StoredFile)


class FileStore:
    """The files in `folder`. A file is there when its description is, which is written last and removed first; what a
    killed server left of others is removed. Methods may be called from any thread.

    Raises HarnessError where the folder cannot be used.
    """

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        records = open_records(folder, "file-*.json", _STORED, "a file", note)
        self._files = {stored.id: stored for stored in records}
        with os_errors(f"cannot use {folder}", "choose another --files"):
            for path in folder.glob("file-*.jsonl"):
                if path.stem not in self._files and not path.with_suffix(".json").exists():
                    path.unlink()

    def all(self) -> list[StoredFile]:
        """The files, the oldest first."""
        with self._lock:
            return sorted(self._files.values(), key=lambda file: (file.created_at, file.id))

    def get(self, id_: str) -> StoredFile | None:
        """A file by its id."""
        with self._lock:
            return self._files.get(id_)

    def content(self, id_: str) -> Path:
        """Where the content of a file is."""
        return self._folder / f"{id_}.jsonl"

    def add(self, filename: str, purpose: Purpose, pieces: Iterable[bytes], id_: str | None = None) -> StoredFile:
        """Keeps a file, under an `id_` that is given in place of one that has it. Raises HarnessError where it cannot
        be written; nothing of it stays then."""
        id_ = id_ or f"file-{secrets.token_hex(12)}"
        path = self.content(id_)
        with os_errors(f"cannot write {self._folder}", _ADVICE):
            with replacing(path) as file:
                size = _write(file, pieces)
            stored = StoredFile(id_, filename, purpose, size, int(time.time()))
            try:
                replace_with(path.with_suffix(".json"), json.dumps(asdict(stored)) + "\n")
            except BaseException:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                raise
        with self._lock:
            self._files[id_] = stored
        return stored

    def remove(self, id_: str) -> None:
        """Removes a file. Raises HarnessError where it cannot."""
        path = self.content(id_)
        with os_errors(f"cannot remove {path}"):
            path.with_suffix(".json").unlink(missing_ok=True)
            with self._lock:
                self._files.pop(id_, None)
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Removes the folder where it holds nothing."""
        with suppress(OSError):
            self._folder.rmdir()


def _write(file: IO[bytes], pieces: Iterable[bytes]) -> int:
    size = 0
    for piece in pieces:
        size += file.write(piece)
    return size
