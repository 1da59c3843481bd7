"""Exit codes of the command line, and errors as one line on stderr."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import click

EXIT_FAILED, EXIT_USAGE, EXIT_HARDWARE, EXIT_INFEASIBLE, EXIT_UNDECIDED, EXIT_INTERRUPTED = 1, 2, 3, 4, 5, 130


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """A HarnessError becomes its line on stderr and exit code 2; Ctrl-C exit code 130."""
    from harness.api import HarnessError

    try:
        yield
    except HarnessError as exc:
        say(f"harness: {exc}", err=True)
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        drop_stdout()
        sys.exit(0)
    except OverflowError as exc:
        say(f"harness: a figure is out of range ({exc}): records or a history were changed by hand", err=True)
        sys.exit(EXIT_USAGE)
    except RuntimeError as exc:  # what Path.resolve says before Python 3.13
        if "Symlink loop" not in str(exc):
            raise
        say(f"harness: {exc}; choose another place", err=True)
        sys.exit(EXIT_USAGE)
    except OSError as exc:
        if isinstance(exc, FileNotFoundError) and exc.filename is None:  # of os.getcwd
            say("harness: the current folder is gone; cd elsewhere", err=True)
            sys.exit(EXIT_USAGE)
        if exc.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # of a name that was given to us
            say(f"harness: {exc.filename}: {exc.strerror}; choose another name", err=True)
            sys.exit(EXIT_USAGE)
        if exc.filename is not None or exc.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):  # not our stdout
            raise
        drop_stdout()
        say(f"harness: cannot print: {exc.strerror or exc}", err=True)
        sys.exit(EXIT_USAGE)


def say(text: str, err: bool = False) -> None:
    """Prints what a command found, whose exit code does not depend on anybody reading it."""
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        drop_stdout()
    except OSError:
        if not err:
            raise


def open_streams() -> None:
    """Makes stdout and stderr fit to be written to, whatever the process was given for them."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # closed: the next file to be opened would get its number, and what is meant for it
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, "w"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a report has signs that not every terminal knows


def drop_stdout() -> None:
    """Nobody reads it any more, or nobody can: what is left in it must not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def interrupt(signum: int, frame: object) -> NoReturn:
    """A signal's handler: as Ctrl-C."""
    raise KeyboardInterrupt
