"""Locks between processes: who holds one, and waits that say what they wait for."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import IO

from harness.api import HarnessError
from harness.common.planted import refuse_planted
from harness.common.printable import printable
from harness.common.regular_file import open_regular
from harness.common.system import LOCK_EX, LOCK_NB, LOCK_SH, flock

#: A wait that is shorter is not told.
_PATIENCE_S = 1.0
_POLL_S = 0.05


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()


#: What takes the line of a wait: stderr, or what a worker sets for the one who started it.
waits: ContextVar[Callable[[str], None]] = ContextVar("waits", default=_print)


def locked(path: Path, busy: str, follow: bool = False) -> IO[bytes]:
    """A file, made if there is none, that no other process can lock until it is closed. `follow`: it may be a link.

    Raises HarnessError, which begins with `busy` and names the holder, if another process has locked it, and OSError
    if it cannot be opened or locked.
    """
    file = open_regular(path, "ab", follow)
    try:
        flock(file.fileno(), LOCK_EX | LOCK_NB)
    except BlockingIOError:
        held_by = holder(file.fileno())
        file.close()
        raise HarnessError(f"{busy} (held by {held_by})") from None
    except BaseException:
        file.close()
        raise
    return file


@contextlib.contextmanager
def waiting(path: Path, what: str, flags: int = 0) -> Iterator[IO[bytes]]:
    """Holds the lock of the file `path`, made if there is none; the kernel releases it when the holder dies.

    Waits for another holder, and says after a second that it waits for `what` and for whom. With `LOCK_NB` as
    `flags` it raises BlockingIOError instead. Raises OSError.
    """
    with open_regular(path, "ab", follow=False) as file:
        lock(file.fileno(), LOCK_EX | flags, f"{what} ({path})")
        yield file


def lock(descriptor: int, operation: int, what: str) -> None:
    """As `flock`, but a wait says after a second that it is for `what`, and who holds the lock."""
    deadline, told = time.monotonic() + _PATIENCE_S, False
    while True:
        try:
            flock(descriptor, operation | LOCK_NB)
            return
        except BlockingIOError:
            if operation & LOCK_NB:
                raise
        if not told and time.monotonic() >= deadline:
            told = True
            waits.get()(f"waiting for {what}, held by {holder(descriptor)}")
        time.sleep(_POLL_S)


def holder(descriptor: int) -> str:
    """Who holds a lock on an open file, as far as this host shows: by /proc/locks and the name of the process."""
    status = os.fstat(descriptor)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            # a line that begins with an arrow is of one that waits
            if "FLOCK" in words and "->" not in words and place in words:
                pid = int(words[words.index(place) - 1])
                if pid > 0:  # 0 or -1: of another container, or of another host
                    return f"process {pid}{_name(pid)}"
    return "another process"


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f" ({Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()})"
    return ""


@contextlib.contextmanager
def in_use(cache: Path) -> Iterator[None]:
    """Keeps `harness cache clean` from the cache folder meanwhile, where the file system has locks.

    Raises HarnessError for a cache that another user may have laid out for us: what it holds is run.
    """
    with contextlib.ExitStack() as held:
        try:
            refuse_planted(cache)
        except OSError as exc:
            raise HarnessError(f"cannot use the cache {cache}: {exc.strerror}; choose another --cache-dir") from None
        with contextlib.suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
            held.callback(os.close, _locked_folder(cache, LOCK_SH))
        yield


@contextlib.contextmanager
def unused(cache: Path) -> Iterator[None]:
    """Keeps runs and jobs from the cache folder meanwhile: they wait. Raises HarnessError where one uses it."""
    try:
        descriptor = _locked_folder(cache, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        raise HarnessError(f"{cache} is in use by a run or a job ({_holder_of(cache)}); wait for it") from None
    except OSError as exc:
        raise HarnessError(f"{cache} cannot be locked: {exc.strerror}; nothing was changed in it") from None
    try:
        yield
    finally:
        os.close(descriptor)


def _holder_of(folder: Path) -> str:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return holder(descriptor)
    finally:
        os.close(descriptor)


def _locked_folder(folder: Path, operation: int) -> int:
    """The descriptor of a folder that is locked until it is closed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, operation, f"the cache {folder}, which `harness cache clean` changes")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
