"""An append-only file of JSON lines that survives kill -9 and a full disk."""

import json
import os
from pathlib import Path


class LineFile:
    """Appends JSON lines, each in one write. A crash leaves at most one truncated last line, which `mend` removes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mend(self) -> None:
        """Removes a truncated last line; completes a last line that lacks only its line feed. Raises OSError."""
        if not self.path.exists():
            return
        with self.path.open("rb+") as file:
            end, line = 0, b"\n"
            for line in file:
                end += len(line) if line.endswith(b"\n") else 0
            if line.endswith(b"\n"):
                return
            try:
                json.loads(line)
            except ValueError:
                file.truncate(end)
            else:
                file.write(b"\n")

    def append(self, line: bytes) -> None:
        """Appends `line`, given without its line feed, and syncs. Raises OSError; the file is then as before."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            try:
                _write_all(descriptor, line + b"\n")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)

    def set_aside(self) -> None:
        """Renames the file, if it exists, to the next free NAME.<number>.SUFFIX. Raises OSError."""
        if not self.path.exists():
            return
        number = 1
        while (target := self.path.with_suffix(f".{number}{self.path.suffix}")).exists():
            number += 1
        self.path.rename(target)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
