"""Folders that are built once, whoever asks, and are whole or absent, even after kill -9 or a full disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.api import DiskFullError


def build_once(folder: Path, what: str, needed: int, build: Callable[[Path], None]) -> Path:
    """`folder`, made by `build(temporary folder)` if it is not there, by one process at a time.

    Written next to its place and renamed when complete. `what` and `needed` (bytes) are for messages. Raises
    DiskFullError where the disk cannot hold it.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        for stale in folder.parent.glob(f"{folder.name}.tmp-*"):  # whoever holds the lock is the only builder
            shutil.rmtree(stale)
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
        temporary.rename(folder)
    except BaseException as exc:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"{folder.parent}: disk full while writing {needed} bytes of {what}") from exc
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock between processes; the kernel releases it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
