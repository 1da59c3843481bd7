"""An append-only file of JSON lines that survives kill -9, a full disk and a power cut."""

import os
from collections.abc import Callable
from pathlib import Path

from harness.api import HarnessError
from harness.common.files import replacing, sync_folder
from harness.common.regular_file import lines_of, open_regular, parse_json


class LineFile:
    """Appends JSON lines, each in one write. A crash leaves at most one truncated last line, which `mend` removes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size: int | None = None  # as this process left it

    def mend(self) -> None:
        """Removes a truncated last line; completes a last line that lacks only its line feed. Raises OSError."""
        if not self.path.exists():
            return
        self._mend()
        self._size = self.path.stat().st_size

    def _mend(self) -> None:
        with open_regular(self.path, "rb+") as file:
            end, line = 0, b"\n"
            for line in lines_of(file):
                end += len(line) if line.endswith(b"\n") else 0
            if line.endswith(b"\n"):
                return
            try:
                parse_json(line)
            except ValueError:
                file.truncate(end)
            else:
                file.write(b"\n")

    def append(self, line: bytes) -> None:
        """Appends `line`, given without its line feed, and syncs. Raises OSError; the file is then as before.

        Raises HarnessError for a file that somebody else has changed: the line could become the end of a torn one.
        """
        with open_regular(self.path, "ab+") as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            whole = size == 0 or _byte_at(descriptor, size - 1) == b"\n"
            if not whole or self._size not in (None, size):
                raise HarnessError(
                    f"{self.path} was changed by another program; nothing more is written to it: run the same command "
                    "again to go on"
                )
            try:
                _write_all(descriptor, line + b"\n")
                os.fsync(descriptor)
                if not size:
                    sync_folder(self.path.parent)  # the file's name is new
            except OSError:
                os.ftruncate(descriptor, size)
                raise
            self._size = size + len(line) + 1

    def set_aside(self, chosen: Callable[[bytes], bool] | None = None) -> None:
        """Renames the file, if it exists, to the next free NAME.<number>.SUFFIX; with `chosen`, moves only the lines
        for which that is true. At any moment each line is in one of the two files, or in both. Raises OSError."""
        if not self.path.exists():
            return
        number = 1
        while (target := self.path.with_suffix(f".{number}{self.path.suffix}")).exists():
            number += 1
        if chosen is None:
            self.path.rename(target)
        else:
            self._move(chosen, target)
        self._size = None

    def _move(self, chosen: Callable[[bytes], bool], target: Path) -> None:
        def copy(to: Path, which: bool) -> None:
            with open_regular(self.path) as lines, replacing(to) as file:
                file.writelines(line for line in lines_of(lines) if chosen(line) is which)
            sync_folder(to.parent)

        with open_regular(self.path) as lines:
            if not any(chosen(line) for line in lines_of(lines)):
                return
        copy(target, True)
        copy(self.path, False)


def _byte_at(descriptor: int, offset: int) -> bytes:
    os.lseek(descriptor, offset, os.SEEK_SET)  # Windows has no pread; and what is appended goes to the end
    return os.read(descriptor, 1)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
