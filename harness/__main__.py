"""The entry of the `harness` command, also as `python -m harness`: takes signals before anything is imported."""

import os
import signal


def main() -> None:
    """Entry point of the console script.

    Until the command has its own handlers there is nothing to clean up, and KeyboardInterrupt would end an import in a
    traceback, so Ctrl-C, SIGTERM and SIGHUP end the process at once. One that is ignored stays so: a job in the
    background ignores Ctrl-C.
    """
    for signum in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", None)):  # Windows has no SIGHUP
        if signum and signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signum, _end)
    from harness.cli.main import main as command
    from harness.common.garbage import collect_rarely

    collect_rarely()
    command()


def _end(signum: int, frame: object) -> None:
    os._exit(128 + signum)


if __name__ == "__main__":
    main()
