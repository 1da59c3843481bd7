"""Exit codes of the command line, and errors as one line on stderr."""

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
    """Turns a HarnessError or a click error into a line on stderr and exit code 2, and Ctrl-C into exit code 130."""
    from harness.api import HarnessError

    try:
        yield
    except HarnessError as exc:
        _exit_usage(str(exc))
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        drop_stdout()
        sys.exit(0)
    except OverflowError as exc:
        _exit_usage(f"a figure is out of range ({exc}): records or a history were changed by hand")
    except RuntimeError as exc:
        if "Symlink loop" not in str(exc):  # Path.resolve before Python 3.13
            raise
        _exit_usage(f"{exc}; choose another place")
    except OSError as exc:
        if isinstance(exc, FileNotFoundError) and exc.filename is None:  # from os.getcwd
            _exit_usage("the current folder is gone; cd elsewhere")
        if exc.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # a name on the command line
            _exit_usage(f"{exc.filename}: {exc.strerror}; choose another name")
        if exc.filename is not None or exc.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):  # not stdout
            raise
        drop_stdout()
        _exit_usage(f"cannot print: {exc.strerror or exc}")


def say(text: str, err: bool = False) -> None:
    """Prints what a command has to say; a closed pipe or a full log does not change its exit code."""
    try:
        click.echo(text, err=err)
    except BrokenPipeError:
        if not err:
            drop_stdout()
    except OSError:
        if not err:
            raise


def open_streams() -> None:
    """Makes stdout and stderr writable, whatever the process was started with."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # closed: the next file to be opened would get its number, and our output
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, "w"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # reports have characters that not every encoding has


def drop_stdout() -> None:
    """Sends the rest of stdout to /dev/null, so that flushing it at exit cannot fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def interrupt(signum: int, frame: object) -> NoReturn:
    """A signal handler that acts like Ctrl-C."""
    raise KeyboardInterrupt


def _exit_usage(text: str) -> NoReturn:
    say(f"harness: {text}", err=True)
    sys.exit(EXIT_USAGE)
