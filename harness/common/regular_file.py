"""Opens regular files only and reads them up to a limit: a pipe would block, and a device would never end."""

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal

from harness.common.planted import refuse_planted

#: The most bytes of a file that is read at once, such as a configuration or an index, and of a line.
MAX_BYTES = 64 << 20

_FLAGS = {
    "rb": os.O_RDONLY,
    "rb+": os.O_RDWR,
    "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    "ab+": os.O_RDWR | os.O_APPEND | os.O_CREAT,
    "wb": os.O_WRONLY | os.O_TRUNC | os.O_CREAT,
}


def open_regular(
    path: Path, mode: Literal["rb", "rb+", "ab", "ab+", "wb"] = "rb", follow: bool = True, permissions: int = 0o666
) -> IO[bytes]:
    """Opens a regular file, made if there is none by all modes but "rb" and "rb+", with `permissions` less the umask.
    Without `follow` a link is none.

    Raises OSError, also for what is no regular file, or is to be written and may be a trap (`refuse_planted`).
    """
    if mode != "rb":
        refuse_planted(path)
    if not hasattr(os, "O_NONBLOCK"):  # no named pipes in the file system either
        return path.open(mode)
    try:
        descriptor = os.open(
            path, _FLAGS[mode] | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW), permissions
        )
    except OSError as exc:
        if exc.errno == errno.ELOOP and path.is_symlink() and not follow:
            raise OSError(errno.EINVAL, "is not a regular file but a link", str(path)) from None
        if exc.errno != errno.ENXIO:
            raise
        raise OSError(errno.EINVAL, "is not a regular file", str(path)) from None  # a pipe that nobody reads
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, "is not a regular file but a folder", str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        return os.fdopen(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises OSError, also for one of more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is larger than {most >> 20} MiB", str(path))
    return content


def read_json(path: Path, most: int = MAX_BYTES) -> Any:
    """The JSON in a regular file. Raises OSError as `read_regular` does, and ValueError for what is not JSON."""
    return parse_json(read_regular(path, most))


def read_kept(path: Path) -> dict[str, Any]:
    """The object in a JSON file of the cache; empty where there is none, or the file is damaged."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def parse_json(text: bytes | str) -> Any:
    """The value that `text` holds. Raises ValueError for all that is not JSON in UTF-8, deep nesting included."""
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def lines_of(file: IO[bytes], most: int = MAX_BYTES) -> Iterator[bytes]:
    """The lines of a file, each with its line feed. Raises OSError at one longer than `most` bytes."""
    while line := file.readline(most + 1):
        if len(line) > most:
            raise OSError(errno.EFBIG, f"has a line of more than {most >> 20} MiB", file.name)
        yield line
