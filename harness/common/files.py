"""Errors, names, atomic replacement and digests of files, and the cache folder."""

import contextlib
import errno
import glob
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

import psutil

from harness.api import HarnessError
from harness.common.locks import locked
from harness.common.planted import refuse_planted
from harness.common.regular_file import open_regular
from harness.common.system import LOCK_EX, LOCK_NB, RENAMES_OPEN_FILES, flock

#: A name that is safe as a file's, and its length.
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
MAX_SAFE_NAME = 128


@contextlib.contextmanager
def os_errors(failed: str, advice: str = "") -> Iterator[None]:
    """Turns an OSError into a HarnessError: what `failed`, why, and what to do about it."""
    try:
        yield
    except OSError as exc:
        raise HarnessError("; ".join(filter(None, (f"{failed}: {exc.strerror or exc}", advice)))) from exc


def replace_with(path: Path, text: str) -> None:
    """Writes `text` to `path` atomically: the old content stays until the new content is complete. Raises OSError."""
    refuse_planted(path)
    path = Path(os.path.realpath(path))  # replaces a link's target, not the link
    if os.path.lexists(path) and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file beside `path` that takes its place when the context ends, with its content on the disk; where the
    context raises, the old file stays. It is locked as by `locked`. Raises OSError."""
    # nobody can guess the name; and where something is there nevertheless, a link for one, it is not opened
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.{os.getpid()}.tmp")
    remove_abandoned_files(path.parent, glob.escape(path.name))
    try:
        with temporary.open("xb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                flock(file.fileno(), LOCK_EX | LOCK_NB)
            yield file
            file.flush()
            os.fsync(file.fileno())  # a rename may outlive a power cut that the data does not
            if not RENAMES_OPEN_FILES:
                file.close()
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_abandoned_files(folder: Path, name: str = "*") -> None:
    """Removes what killed processes left where `replacing` writes the files in `folder` called `name`, a pattern. A
    process id alone does not tell: it may be of another container, whose process holds the lock."""
    with contextlib.suppress(OSError, OverflowError):  # the latter for a number that is no process's
        for left in folder.glob(f".{name}.*.tmp"):
            number = left.name.split(".")[-2]
            if number.isdecimal() and not psutil.pid_exists(int(number)):
                with contextlib.suppress(HarnessError), locked(left, ""):
                    left.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` as lasting as the files' content, where the file system lets us. Raises OSError."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.EACCES, errno.EOPNOTSUPP):
            raise


def safe_name(text: str) -> str:
    """A file name, without a suffix, for any text: the text itself where it is safe and short enough.

    Another text gets a digest of it appended, so that texts that differ only in what is replaced keep different names.
    """
    if SAFE_NAME.fullmatch(text) and len(text) <= MAX_SAFE_NAME:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", text[:MAX_SAFE_NAME]).strip("-._")
    return f"{readable}-{digest}" if readable else digest


def inside(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`. Raises HarnessError where it leads out of the folder, by itself or by a link."""
    path = folder / name
    try:
        leads_out = not path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # also for NUL, and for circular links before Python 3.13
        leads_out = True
    if leads_out:
        raise HarnessError(f"{str(path)!r} leads out of {folder}; move it away, or choose another folder with --out")
    return path


def is_below(name: str) -> bool:
    """Whether `name`, joined to a folder, names something below it, whatever links there are."""
    return not (Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name)


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
        with open_regular(path) as file:
            return hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()
    except OSError:
        return None


def default_cache() -> Path:
    """HARNESS_CACHE, or the user's cache folder. Raises HarnessError where neither is known."""
    if own := os.environ.get("HARNESS_CACHE"):
        return Path(own)
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # HOME is not set, and the user id has no entry
        raise HarnessError("this user has no home folder for the cache; set HARNESS_CACHE") from None
    return base / "offload-harness"
