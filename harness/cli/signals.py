"""Ctrl-C, SIGTERM and SIGHUP end a command alike: what it has open is closed and removed, and its exit code tells the
signal."""

import contextlib
import os
import signal
from collections.abc import Iterator

#: Windows has no SIGHUP.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """A signal asked the command to end, which is all that KeyboardInterrupt means to whatever cleans up."""

    def __init__(self, signum: int = signal.SIGINT) -> None:
        super().__init__()
        self.signum = signum


def exit_code(exc: BaseException | None) -> int:
    """The exit code of a command that an exception, or one that led to it, ended: 128 and the signal's number."""
    while exc is not None:
        if isinstance(exc, Stopped):
            return 128 + exc.signum
        exc = exc.__cause__ or exc.__context__
    return 128 + signal.SIGINT


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Raises Stopped in the main thread at each of these signals, unless it is ignored, as nohup ignores SIGHUP. A
    process forked from this one, such as a worker of multiprocessing that its pool ends by SIGTERM, just ends."""
    command = os.getpid()

    def stop(signum: int, frame: object) -> None:
        if os.getpid() == command:
            raise Stopped(signum)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    earlier = {signum: signal.getsignal(signum) for signum in SIGNALS}
    taken = {signum: handler for signum, handler in earlier.items() if handler != signal.SIG_IGN}
    for signum in taken:
        signal.signal(signum, stop)
    try:
        yield
    finally:
        for signum, handler in taken.items():
            signal.signal(signum, handler)
