"""Progress of a job on stderr: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_EVERY_S = 10.0


class BarProgress:
    """A bar for the current phase, with tokens per second and the time left."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True, emoji=False),
            transient=True,
        )
        self._phase = ""
        self._task: TaskID | None = None
        self._began = 0.0

    def __enter__(self) -> BarProgress:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        self._progress.console.print(text, style="dim", markup=False, highlight=False)

    def advance(self, phase: str, done: int, total: int, tokens: int = 0) -> None:
        if phase != self._phase or self._task is None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._phase, self._began = phase, time.monotonic()
            self._task = self._progress.add_task(phase, total=total, rate="")
        self._progress.update(self._task, completed=done, total=total, rate=_rate(tokens, self._began))


class LineProgress:
    """A line for each phase, and one every few seconds while it lasts; for logs and CI."""

    def __init__(self) -> None:
        self._phase = ""
        self._began = self._printed = 0.0

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full or closed log must not end the job
            sys.stderr.write(f"{text}\n")
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


def make_job_progress() -> BarProgress | LineProgress:
    """A bar on a terminal; lines where stderr is not one, or where CI is set."""
    return BarProgress() if sys.stderr.isatty() and not os.environ.get("CI") else LineProgress()


def _rate(tokens: int, began: float) -> str:
    spent = time.monotonic() - began
    return f"{tokens / spent:.3g} tok/s" if tokens and spent > 0 else ""
