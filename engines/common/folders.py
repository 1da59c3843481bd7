"""Folders that are built once, whoever asks, and are whole or absent, even after kill -9 or a full disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.api import DiskFullError, HarnessError

#: Where a folder's configuration says how the file that it was made from stored most weights, if not as floats.
QUANTIZED = "quantized_in_file"


def build_once(folder: Path, what: str, needed: int, build: Callable[[Path], None]) -> Path:
    """`folder`, made by `build(temporary folder)` if it is not there, by one process at a time.

    Written next to its place, and renamed when it is complete and on disk. `what` and `needed` (bytes) are for
    messages. Raises DiskFullError where the disk cannot hold it, HarnessError where nothing can be written.
    """
    if folder.is_dir():
        return folder
    lock = _lock_of(folder.name, folder.parent)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as exc:
        raise HarnessError(f"cannot write {folder.parent}: {exc.strerror}; choose another cache directory") from exc
    _clear(folder.parent)
    with _locked(lock):
        for stale in folder.parent.glob(f"{folder.name}.tmp-*"):  # of who held the lock just now, and was killed
            shutil.rmtree(stale, ignore_errors=True)
        if not folder.is_dir():
            _build(folder, what, needed, build)
    return folder


def _build(folder: Path, what: str, needed: int, build: Callable[[Path], None]) -> None:
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise DiskFullError(f"{folder.parent}: {what} need {needed} bytes, {free} are free; free the rest")
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir()
        build(temporary)
        for path in [*temporary.rglob("*"), temporary]:
            _sync(path)
        temporary.rename(folder)
    except BaseException as exc:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"{folder.parent}: disk full while writing {needed} bytes of {what}") from exc
        raise


def _sync(path: Path) -> None:
    """To disk, and out of the page cache: a later run under a memory limit must not find it there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if path.is_file():
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _clear(parent: Path) -> None:
    """Removes what builders that were killed have left: a lock that is free has no living builder."""
    for stale in parent.glob("*.tmp-*"):
        with (
            suppress(BlockingIOError, PermissionError),
            _locked(_lock_of(stale.name.rpartition(".tmp-")[0], parent), fcntl.LOCK_NB),
        ):
            shutil.rmtree(stale, ignore_errors=True)


def _lock_of(name: str, parent: Path) -> Path:
    return parent / f"{name}.lock"


@contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[None]:
    """An exclusive lock between processes; the kernel releases it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | flags)
        yield
