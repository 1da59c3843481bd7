"""Progress of a job on stderr: a bar on a terminal, a line every few seconds elsewhere."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from harness.common.printable import printable
from harness.common.units import rounded

_EVERY_S = 10.0


class BarProgress:
    """A bar for the current phase, with tokens per second and the time left."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", visible=False, rate="")
        self._phase = ""
        self._began = 0.0

    def note(self, text: str) -> None:
        self._progress.console.print(printable(text), style="dim", highlight=False)

    def advance(self, phase: str, done: int, total: int, tokens: int = 0) -> None:
        if phase != self._phase:
            self._phase, self._began = phase, time.monotonic()
            self._progress.reset(self._task, description=printable(phase), visible=True)
        self._progress.update(self._task, completed=done, total=total, rate=_rate(tokens, self._began))


class LineProgress:
    """A line for each phase, and one every few seconds while it lasts; for logs and CI."""

    def __init__(self) -> None:
        self._phase = ""
        self._began = self._printed = 0.0

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk or closed pipe must not end the job
            sys.stderr.write(f"{printable(text)}\n")
            sys.stderr.flush()

    def advance(self, phase: str, done: int, total: int, tokens: int = 0) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._began, self._printed = phase, now, now
        if now - self._printed < _EVERY_S and done < total:
            return
        spent = now - self._began
        if done < total or spent > _EVERY_S or tokens:
            left = f", {spent / done * (total - done):.0f} s left" if 0 < done < total else ""
            self.note(" ".join(f"{phase}: {done}/{total} {_rate(tokens, self._began)}".split()) + left)
        self._printed = now


class QuietProgress:
    """Shows nothing."""

    def note(self, text: str) -> None: ...

    def advance(self, phase: str, done: int, total: int, tokens: int = 0) -> None: ...


QUIET = QuietProgress()


@contextlib.contextmanager
def make_job_progress() -> Iterator[BarProgress | LineProgress]:
    """A bar on a terminal; lines where stderr is not one, or where CI is set."""
    if not sys.stderr.isatty() or os.environ.get("CI"):
        yield LineProgress()
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True, emoji=False, markup=False),
        transient=True,
    ) as progress:
        yield BarProgress(progress)


def _rate(tokens: int, began: float) -> str:
    spent = time.monotonic() - began
    return f"{rounded(tokens / spent)} tok/s" if tokens and spent > 0 else ""
