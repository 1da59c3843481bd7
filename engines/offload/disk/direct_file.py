"""Unnamed scratch files with direct I/O, whose transfers are complete or raise, at most at a throttle's rate."""

import errno
import mmap
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from engines.offload.disk.throttle import Throttle
from harness.api import DiskFullError, HarnessError
from harness.common.buffers import direct_buffer
from harness.common.classify import DISK_FULL

_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


class DiskFile:
    """An unnamed file of `nbytes` bytes in `folder`; it is freed by `close` or when the process ends.

    `what`: its name in messages. `direct`: whether I/O bypasses the page cache; where the file system refuses that, the
    cache is dropped after each transfer. Raises DiskFullError where there is no space,
    HarnessError where it cannot be made.
    """

    def __init__(self, folder: Path, nbytes: int, what: str, throttle: Throttle) -> None:
        self._what = what
        self._throttle = throttle
        self._descriptor = -1
        try:
            self._descriptor, self.direct = _unnamed(folder, what)
            os.posix_fallocate(self._descriptor, 0, max(nbytes, mmap.PAGESIZE))
        except OSError as exc:
            self.close()
            if exc.errno in DISK_FULL:
                raise DiskFullError(f"{folder}: no room for {nbytes} bytes of {what} on disk: {exc.strerror}") from exc
            raise HarnessError(f"{folder}: cannot keep {what} on disk: {exc.strerror}") from exc

    def read(self, view: memoryview, offset: int) -> None:
        """Fills `view` from byte `offset`, both page-aligned. Raises HarnessError."""
        self._move("read", os.preadv, view, offset)

    def write(self, view: memoryview, offset: int) -> None:
        """Writes all of `view` at byte `offset`, both page-aligned. Raises HarnessError."""
        self._move("write", os.pwritev, view, offset)

    def close(self) -> None:
        """Frees the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _move(self, verb: str, move: Callable[..., int], view: memoryview, offset: int) -> None:
        began, start, size = time.perf_counter(), offset, len(view)
        try:
            while view:
                count = move(self._descriptor, [view], offset)
                if count <= 0:
                    raise HarnessError(f"{self._what} on disk: {verb} of {size} bytes at byte {start} came to an end")
                view, offset = view[count:], offset + count
            if not self.direct:
                os.posix_fadvise(self._descriptor, start, size, os.POSIX_FADV_DONTNEED)
        except OSError as exc:
            raise HarnessError(f"{self._what} on disk: {verb} of {size} bytes at byte {start}: {exc.strerror}") from exc
        self._throttle.wait(size, began)


def reads_directly(path: Path) -> bool:
    """Whether reads of a file can bypass the page cache. Tries one: some file systems refuse not `open`, but `read`."""
    try:
        with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_DIRECT)) as file:
            file.readinto(direct_buffer(mmap.PAGESIZE))
    except OSError:
        return False
    return True


def _unnamed(folder: Path, what: str) -> tuple[int, bool]:
    """A descriptor of an empty unnamed file, and whether its I/O is direct."""
    path = folder / f"{what}-{secrets.token_hex(4)}.probe"  # not that of a process that was killed
    try:
        with path.open("xb") as probe:
            probe.write(bytes(mmap.PAGESIZE))
        direct = os.O_DIRECT if reads_directly(path) else 0
        path.unlink()
        try:
            return os.open(folder, os.O_RDWR | os.O_TMPFILE | direct, 0o600), bool(direct)
        except OSError as exc:
            if exc.errno not in _NO_UNNAMED:
                raise
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | direct, 0o600), bool(direct)
    finally:
        path.unlink(missing_ok=True)
