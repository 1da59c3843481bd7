"""Ctrl-C, SIGTERM and SIGHUP end a command alike: what it has open is closed and removed, and its exit code tells the
signal."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

#: Windows has no SIGHUP.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
#: How soon a signal comes again that could not be raised, in seconds.
_AGAIN_S = 0.05
#: Signals that have asked the command to end, in their order.
_came: list[int] = []


class Stopped(KeyboardInterrupt):
    """A signal asked the command to end, which is all that KeyboardInterrupt means to whatever cleans up."""

    def __init__(self, signum: int = signal.SIGINT) -> None:
        super().__init__()
        self.signum = signum


def exit_code(exc: BaseException | None) -> int | None:
    """The exit code of a command that ends with an exception to which a signal led, perhaps by way of an error of what
    cleans up: 128 and the signal's number. None where no signal did.

    Ray raises a KeyboardInterrupt of its own for a signal that comes while it waits: then it is the last signal.
    """
    while exc is not None:
        if isinstance(exc, Stopped):
            return 128 + exc.signum
        if isinstance(exc, KeyboardInterrupt):
            return 128 + (_came[-1] if _came else signal.SIGINT)
        exc = exc.__cause__ or exc.__context__
    return None


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Raises Stopped in the main thread at each of these signals, unless it is ignored, as nohup ignores SIGHUP. A
    process forked from this one, such as a worker of multiprocessing that its pool ends by SIGTERM, just ends.

    Where Stopped cannot be raised, as in `__del__` or while a module of Cython is imported, the signal comes again."""
    command = os.getpid()
    _came.clear()

    def stop(signum: int, frame: object) -> None:
        if os.getpid() == command:
            _came.append(signum)
            raise Stopped(signum)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    def send_again(unraisable: "sys.UnraisableHookArgs") -> None:
        if isinstance(unraisable.exc_value, Stopped):
            threading.Timer(_AGAIN_S, os.kill, (command, unraisable.exc_value.signum)).start()
        else:
            unraisable_hook(unraisable)

    unraisable_hook, sys.unraisablehook = sys.unraisablehook, send_again
    earlier = {signum: signal.getsignal(signum) for signum in SIGNALS}
    taken = {signum: handler for signum, handler in earlier.items() if handler != signal.SIG_IGN}
    for signum in taken:
        signal.signal(signum, stop)
    try:
        yield
    finally:
        for signum, handler in taken.items():
            signal.signal(signum, handler)
        sys.unraisablehook = unraisable_hook
