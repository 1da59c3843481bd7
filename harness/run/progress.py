"""Progress on stderr: a live table on a terminal, plain lines elsewhere."""

import contextlib
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness.api import RunRecord
from harness.common.printable import printable
from harness.common.units import rounded
from harness.run.steps import Step

_STATUS_STYLE = {"ok": "green", "interrupted": "yellow", "skipped": "yellow"}


class Progress(ABC):
    """Counts a run's launches, done and to do, and estimates the time left; subclasses show it."""

    def __init__(self) -> None:
        self._walls: dict[str, list[float]] = defaultdict(list)  # of timed launches, by cell
        self._todo: list[Step] = []
        self._done = self._total = 0

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *exc: object) -> None:
        """Ends the display."""

    def planned(self, steps: Sequence[Step], already_done: int) -> None:
        self._todo, self._done, self._total = list(steps), already_done, len(steps) + already_done

    @abstractmethod
    def started(self, step: Step, activity: str) -> None:
        """A launch has begun an activity."""

    @abstractmethod
    def event(self, phase: str, done: int, total: int) -> None:
        """The launch that runs has done so much of a phase."""

    def finished(self, step: Step, record: RunRecord) -> None:
        self._done += 1
        self._todo = [s for s in self._todo if s != step]
        self._walls[step.cell.name].append(record.wall_s)

    def dropped(self, step: Step) -> None:
        self._todo = [s for s in self._todo if s != step]
        self._total -= 1

    def added(self, steps: Sequence[Step]) -> None:
        self._todo = [*steps, *self._todo]
        self._total += len(steps)

    @abstractmethod
    def note(self, text: str) -> None:
        """Shows a line beside the launches."""

    def left(self, spent: float) -> str:
        """The time for the launches to do, less what the first has `spent`; empty before any was timed.

        A launch is expected to take its cell's mean, or the mean of all for a cell that was not timed yet.
        """
        if not self._walls:
            return ""
        mean = statistics.fmean(wall for walls in self._walls.values() for wall in walls)
        total = sum(statistics.fmean(self._walls.get(s.cell.name, [mean])) for s in self._todo)
        return duration(max(0.0, total - spent), all(s.cell.name in self._walls for s in self._todo))


class PlainProgress(Progress):
    """One line when a launch starts and another when it ends; for logs and CI."""

    _phase = ""

    def planned(self, steps: Sequence[Step], already_done: int) -> None:
        super().planned(steps, already_done)
        resumed = f" ({already_done} already done{'' if steps else '; --fresh starts over'})" if already_done else ""
        self.note(f"{len(steps)} {'launch' if len(steps) == 1 else 'launches'} to do{resumed}")

    def __exit__(self, *exc: object) -> None:
        """Lines stay as they are."""

    def started(self, step: Step, activity: str) -> None:
        self._phase = ""
        self.note(f"[{self._done + 1}/{self._total}] {step.cell.name}: {activity}")

    def event(self, phase: str, done: int, total: int) -> None:
        """Shows only builds, which take minutes before a launch begins, and waits for others; other phases would
        clutter a log."""
        if phase != self._phase and phase.startswith(("building", "waiting")):
            self.note(f"[{self._done + 1}/{self._total}] {phase}")
        self._phase = phase

    def finished(self, step: Step, record: RunRecord) -> None:
        super().finished(step, record)
        left = f"; {self.left(0.0)} left" if self._todo else ""
        self.note(f"[{self._done}/{self._total}] {describe(record)}{left}")

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk or closed pipe must not end the measurement
            sys.stderr.write(f"{printable(text)}\n")
            sys.stderr.flush()


class QuietProgress(Progress):
    """Shows nothing."""

    def __exit__(self, *exc: object) -> None: ...

    def started(self, step: Step, activity: str) -> None: ...

    def event(self, phase: str, done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...


class LiveProgress(Progress):
    """A table with the cell, phase, tokens, rate and time left, above it a line for each finished launch."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(stderr=True, emoji=False, markup=False)
        self._activity = self._phase = ""
        self._tokens = (0, 0)
        self._step: Step | None = None
        self._started = self._phase_started = time.monotonic()
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.__exit__(None, None, None)

    def started(self, step: Step, activity: str) -> None:
        self._step, self._activity, self._phase, self._tokens = step, activity, "", (0, 0)
        self._started = time.monotonic()  # probes and searches restart it, so the launch's own call counts in the end

    def event(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self._phase, self._phase_started = phase, time.monotonic()
        self._tokens = (done, total)

    def finished(self, step: Step, record: RunRecord) -> None:
        super().finished(step, record)
        self._step = None
        self._console.print(Text(printable(describe(record)), style=_STATUS_STYLE.get(record.status, "red")))

    def note(self, text: str) -> None:
        self._console.print(Text(printable(text), style="dim"))

    def _render(self) -> Group:
        done, total = self._tokens
        elapsed = time.monotonic() - self._phase_started
        rate = f"{done / elapsed:.2f} tok/s" if self._phase == "generate" and done and elapsed > 0 else ""
        table = Table(box=None, pad_edge=False)
        for column in ("launch", "cell", "doing", "phase", "progress", "rate", "time left"):
            table.add_column(column, style="bold" if column == "cell" else "")
        table.add_row(
            f"{min(self._done + 1, self._total)}/{self._total}",
            self._step.cell.name if self._step else "",
            printable(self._activity),
            f"{printable(self._phase)} {elapsed:.0f} s" if self._phase else "",
            f"{done}/{total}" if total else "",
            rate,
            self.left(time.monotonic() - self._started) or "not known yet",
        )
        return Group(table, ProgressBar(total=max(1, self._total), completed=self._done, width=60))


def make_progress() -> Progress:
    """Live progress if stderr is a terminal, plain progress otherwise or if CI is set."""
    if sys.stderr.isatty() and not os.environ.get("CI"):
        return LiveProgress()
    return PlainProgress()


def describe(record: RunRecord) -> str:
    """A one-line summary of a finished launch."""
    head = f"{record.spec.name} repeat {record.repeat + 1}/{record.spec.repeats}"
    if record.status == "ok":
        rate = record.metrics.get("generation_throughput_tok_s", record.metrics.get("score_throughput_tok_s"))
        if rate is None:
            return f"{head}: ok"
        shown = rounded(rate)
        return f"{head}: {shown} tok/s in {record.wall_s:.0f} s"
    expected = " (expected)" if record.status == record.spec.expect else ""
    return f"{head}: {record.status}{expected}: {record.reason}"


def duration(seconds: float, complete: bool) -> str:
    """A rounded duration, prefixed by `about` unless the estimate is `complete`."""
    text = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    return text if complete else f"about {text}"
