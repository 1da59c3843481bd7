"""Exit codes of the command line, its output, and errors as one line on stderr."""

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, TextIO

import click

from harness.cli.signals import exit_code
from harness.common.printable import GrowingPrintable, printable

EXIT_FAILED, EXIT_USAGE, EXIT_HARDWARE, EXIT_INFEASIBLE, EXIT_UNDECIDED = 1, 2, 3, 4, 5
EXIT_INTERRUPTED = 130


#: What is said where a library, a thread or a map finds no memory, such as under `ulimit -v`.
_OUT_OF_MEMORY = ("failed to map segment", "cannot allocate memory", "can't start new thread")
#: Errors of a write to a full or missing disk.
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns a HarnessError or a click error into a line on stderr and exit code 2, and a signal such as Ctrl-C into
    its exit code, whatever fails on the way out."""
    from harness.api import HarnessError, HarnessErrors, first_line

    try:
        yield
    except HarnessErrors as exc:
        _exit_usage(exc, *str(exc).split("\n"))
    except HarnessError as exc:
        _exit_usage(exc, str(exc))
    except click.ClickException as exc:
        vars(exc)["message"] = printable(_line(exc.message))  # which is final to type checkers
        with contextlib.suppress(OSError):  # a full stderr
            exc.show()
        sys.exit(exc.exit_code)
    except (click.Abort, KeyboardInterrupt) as exc:
        sys.exit(exit_code(exc) or EXIT_INTERRUPTED)
    except BrokenPipeError as exc:
        drop(sys.stdout)
        sys.exit(exit_code(exc) or 0)
    except Exception as exc:
        text = _in_words(exc)
        if text is None and exit_code(exc) is not None:
            text = f"while the command ended: {type(exc).__name__}: {first_line(exc)}"
        if text is None:
            raise
        _exit_usage(exc, text)


def _in_words(exc: Exception) -> str | None:
    """What a user can do about an error of Python or of the system; None for a mistake of ours."""
    if _is_out_of_memory(exc):
        what = str(exc).strip().partition("\n")[0] or type(exc).__name__
        return f"out of memory ({what}); end other programs, or raise the limit (ulimit -v)"
    if isinstance(exc, OverflowError):
        return f"a figure is out of range ({exc}): records or a history were changed by hand"
    if isinstance(exc, RuntimeError) and "Symlink loop" in str(exc):  # Path.resolve before Python 3.13
        return f"{exc}; choose another place"
    if isinstance(exc, RuntimeError) and "home directory" in str(exc):  # Path.expanduser
        return "a path begins with ~ and its home folder is unknown; write the path in full"
    return _os_error_in_words(exc) if isinstance(exc, OSError) else None


def _os_error_in_words(exc: OSError) -> str | None:
    if isinstance(exc, FileNotFoundError) and exc.filename is None:  # from os.getcwd
        return "the current folder is gone; cd elsewhere"
    if exc.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # a name on the command line
        return f"{exc.filename}: {exc.strerror}; choose another name"
    if exc.filename is not None or exc.errno not in _NOT_WRITTEN:  # not stdout
        return None
    drop(sys.stdout)
    return f"cannot print: {exc.strerror or exc}"


def _is_out_of_memory(exc: BaseException | None) -> bool:
    """Whether an exception, or one that led to it, is for want of memory: libraries raise ImportError for it."""
    while exc is not None:
        if isinstance(exc, MemoryError) or (isinstance(exc, OSError) and exc.errno == errno.ENOMEM):
            return True
        if isinstance(exc, ImportError | RuntimeError) and any(words in str(exc).lower() for words in _OUT_OF_MEMORY):
            return True
        exc = exc.__cause__ or exc.__context__
    return False


def say(text: str, err: bool = False) -> None:
    """Prints what a command has to say, as `printable` text; a closed pipe or a full log does not change its exit code.

    Commands print by this, `say_json` and `say_pieces` only.
    """
    _write(f"{printable(text)}\n", err)


def say_pieces(pieces: Iterable[str]) -> None:
    """Prints a text as its pieces come, and a line's end."""
    growing = GrowingPrintable()
    try:
        for piece in pieces:
            _write(growing.add(piece))
    finally:
        _write(f"{growing.end()}\n")


def _write(text: str, err: bool = False) -> None:
    try:
        click.echo(text, err=err, nl=False)
    except BrokenPipeError:
        if not err:
            drop(sys.stdout)
    except OSError:
        if not err:
            raise


def say_json(value: Any) -> None:
    """Prints plain data as a line of JSON: as given, with escapes where `printable` would change it."""
    say(json.dumps(value).replace("##", "#\\u0023").replace("\x7f", "\\u007f"))


def open_streams() -> None:
    """Makes stdout and stderr writable, whatever the process was started with."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # closed: the next file to be opened would get its number, and our output
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, "w"))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # reports have characters that not every encoding has


def drop(stream: TextIO) -> None:
    """Sends the rest of stdout or stderr to /dev/null, so that flushing it at exit cannot fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def settle_stderr() -> None:
    """Drops what a closed or full stderr did not take: Python would end with code 120 for it."""
    try:
        sys.stderr.flush()
    except OSError:
        drop(sys.stderr)


def _exit_usage(exc: BaseException, *errors: str) -> NoReturn:
    say("harness: " + "\n".join(map(_line, errors)), err=True)
    sys.exit(exit_code(exc) or EXIT_USAGE)


def _line(text: str) -> str:
    """An error in one line, whatever the name of a file or the value of an option holds."""
    return " ".join(text.splitlines())
