"""Scratch folders: removed by the process that made one, and by the next that makes one where it was killed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.common.files import remove_abandoned_files
from harness.common.locks import lock
from harness.common.system import LOCK_EX, LOCK_NB, flock

#: Below a cache: the folder that holds nothing but scratch folders.
WORK = "work"


@contextmanager
def scratch_folder(cache: Path, name: str = "") -> Iterator[Path]:
    """An empty folder below `cache`/work for as long as the context lasts.

    With a `name` it is called so, and nobody else may use that name meanwhile. Raises OSError where it cannot be made.
    """
    parent = cache / WORK
    parent.mkdir(parents=True, exist_ok=True)
    with _held(parent):  # nobody looks for abandoned folders before a new one is locked
        _remove_abandoned(parent)
        if name:
            folder = parent / name
            shutil.rmtree(folder, ignore_errors=True)  # the file system may have no locks
            folder.mkdir(mode=0o700)  # requests to workers may hold secrets
        else:
            folder = Path(tempfile.mkdtemp(dir=parent))
        descriptor = _lock(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned(cache: Path) -> None:
    """Removes the scratch folders below `cache`, and the half-written files in it, whose processes were killed, as far
    as this process may."""
    remove_abandoned_files(cache)
    parent = cache / WORK
    if parent.is_dir():
        with suppress(OSError), _held(parent):
            _remove_abandoned(parent)


def _remove_abandoned(parent: Path) -> None:
    for folder in list(parent.iterdir()):
        with suppress(OSError):  # a lock that is not free, too, is one
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                flock(descriptor, LOCK_EX | LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    descriptor = _lock(folder)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> int:
    """A descriptor of `folder` that holds its lock until it is closed; the kernel closes it with its process. Where the
    file system locks no folders nobody gets a lock, and nothing is removed as abandoned."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
        lock(descriptor, LOCK_EX, f"scratch folders in {folder} to be made and removed")
    return descriptor
