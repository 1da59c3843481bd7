"""Where operating systems differ: which of them runs engines, how many processors a process may use, and file locks."""

import errno
import importlib
import os
import platform
from typing import Any

from harness.api import HarnessError


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


#: Python's modules of system calls, None where the system has no such calls: of Unix, and of Windows.
_fcntl, _msvcrt = _module("fcntl"), _module("msvcrt")
#: What does without Linux, in words.
WORKS = "plan, run --simulate, report, compare, history and validate work here"
#: The operations of `flock`, those of Unix.
LOCK_SH, LOCK_EX, LOCK_NB = 1, 2, 4
#: Whether a file that this process has open can be renamed, and another of its name replaced.
RENAMES_OPEN_FILES = os.name != "nt"
#: The byte that stands for a file on Windows, where a lock keeps others from reading what it covers: after any content.
_LOCK_BYTE = (1 << 31) - 2


def runs_engines() -> bool:
    """Whether this is Linux: engines are limited, read their disks and end with their parent by what it alone has."""
    return platform.system() == "Linux"


def require_linux(what: str) -> None:
    """Raises HarnessError where engines do not run, for `what` runs one."""
    if not runs_engines():
        system = platform.system() or "an unknown system"
        raise HarnessError(f"{what} needs Linux, and this is {system}: use a Linux machine or container; {WORKS}")


def usable_cpus() -> int:
    """Processors that this process may run on; all of the machine where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def drop_from_page_cache(descriptor: int, offset: int = 0, nbytes: int = 0) -> None:
    """Asks the system to forget what it has cached of a file, from `offset` for `nbytes`, 0 for all that follows. Does
    nothing where it takes no such advice."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def flock(descriptor: int, operation: int) -> None:
    """Locks an open file until it is closed, as fcntl.flock does. Raises BlockingIOError with `LOCK_NB` where another
    holds it, and OSError where the system cannot lock this: Windows has no locks of folders, and none that are shared.

    Windows locks a byte instead and always answers at once.
    """
    if _fcntl is not None:
        _fcntl.flock(descriptor, operation)
        return
    if _msvcrt is None or operation & LOCK_SH:
        raise OSError(errno.ENOLCK, "this system has no such lock")
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    os.lseek(descriptor, _LOCK_BYTE, os.SEEK_SET)
    try:
        _msvcrt.locking(descriptor, _msvcrt.LK_NBLCK, 1)
    except PermissionError as exc:
        raise BlockingIOError(errno.EAGAIN, "locked by another process") from exc
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)
