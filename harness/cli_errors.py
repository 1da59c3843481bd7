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
        click.echo(f"harness: {exc}", err=True)
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        drop_stdout()
        sys.exit(0)
    except OSError as exc:
        if exc.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # of a name that was given to us
            click.echo(f"harness: {exc.filename}: {exc.strerror}; choose another name", err=True)
            sys.exit(EXIT_USAGE)
        if exc.filename is not None or exc.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):  # not our stdout
            raise
        drop_stdout()
        click.echo(f"harness: cannot print: {exc.strerror or exc}", err=True)
        sys.exit(EXIT_USAGE)


def drop_stdout() -> None:
    """Nobody reads it any more, or nobody can: what is left in it must not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def interrupt(signum: int, frame: object) -> NoReturn:
    """A signal's handler: as Ctrl-C."""
    raise KeyboardInterrupt
