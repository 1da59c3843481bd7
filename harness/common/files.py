"""Errors, locks, atomic replacement and digests of files, and the cache folder."""

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from harness.api import HarnessError


@contextlib.contextmanager
def os_errors(failed: str, advice: str = "") -> Iterator[None]:
    """Turns an OSError into a HarnessError: what `failed`, why, and what to do about it."""
    try:
        yield
    except OSError as exc:
        raise HarnessError("; ".join(filter(None, (f"{failed}: {exc.strerror or exc}", advice)))) from exc


def locked(path: Path, busy: str) -> IO[bytes]:
    """A file, made if there is none, that no other process can lock until it is closed.

    Raises HarnessError(`busy`) if another process has locked it, and OSError if it cannot be opened.
    """
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise HarnessError(busy) from None
    return file


def replace_with(path: Path, text: str) -> None:
    """Writes `text` to `path` atomically: the old content stays until the new content is complete. Raises OSError."""
    path = Path(os.path.realpath(path))  # replaces a link's target, not the link
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    if os.path.lexists(path) and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def is_there(name: str) -> bool:
    """Whether `name` is an existing file or folder. Other texts, such as model ids, may be longer than any path."""
    try:
        return bool(name) and Path(name).exists()
    except OSError:
        return False


def nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(path for path in (folder, *folder.resolve().parents) if path.exists())


def file_digest(path: Path) -> str | None:
    """The SHA-256 of a file, or None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def default_cache() -> Path:
    """HARNESS_CACHE, or the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HARNESS_CACHE") or Path(base) / "offload-harness")
