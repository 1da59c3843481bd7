"""Builds a folder once among concurrent processes: it is complete or absent, even after kill -9 or a full disk."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness.api import DiskFullError
from harness.common.files import os_errors
from harness.common.locks import waiting
from harness.common.regular_file import open_regular
from harness.common.system import LOCK_NB

#: Key of config.json: the quantized type in which a converted file stored most weights; empty for a float type.
QUANTIZED = "quantized_in_file"


def build_once(folder: Path, what: str, needed: int, build: Callable[[Path], None]) -> Path:
    """Returns `folder`, after `build(temporary folder)` where it does not exist; one process builds at a time.

    The build goes to a sibling folder, which is renamed once it is complete and synced to disk. `what` and `needed`
    (bytes) are for messages. Raises DiskFullError where the disk cannot hold it, HarnessError where the parent folder
    is not writable.
    """
    _remove_stale(folder.parent)
    if folder.is_dir():
        return folder
    lock = folder.with_name(f"{folder.name}.lock")
    with os_errors(f"cannot write {folder.parent}", "choose another cache directory"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        open_regular(lock, "ab", follow=False).close()
    with waiting(lock, f"{what} to be written"):
        for stale in folder.parent.glob(f"{folder.name}.tmp-*"):  # left by the previous lock holder, if it was killed
            shutil.rmtree(stale, ignore_errors=True)
        if not folder.is_dir():
            _build(folder, what, needed, build)
    return folder


def _build(folder: Path, what: str, needed: int, build: Callable[[Path], None]) -> None:
    free = shutil.disk_usage(folder.parent).free
    if needed > free:
        raise DiskFullError(
            f"{folder.parent}: {what} need {needed} bytes, {free} are free; free {needed - free} bytes more"
        )
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
    """Syncs a file or folder to disk and drops a file from the page cache: a run under a memory limit starts cold."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if path.is_file():
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _remove_stale(parent: Path) -> None:
    """Removes the temporary folders of killed builders: a free lock means that no builder is alive. Nothing that fails
    here fails a build: the cache may be another user's, or read-only."""
    stale: list[Path] = []
    with suppress(OSError):
        stale += parent.glob("*.tmp-*")
    for folder in stale:
        lock = parent / f"{folder.name.rpartition('.tmp-')[0]}.lock"
        with suppress(OSError), waiting(lock, "", LOCK_NB):
            shutil.rmtree(folder, ignore_errors=True)
