"""Runs cases, some at a time, and tells what is wrong with each.

Starting Python takes a third of a second, and importing torch several: so this process imports the harness once, and a
case runs in a fork of it (tests/barrage/child.py), or in a process of its own where it has a line of shell.
"""

import contextlib
import importlib
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.barrage import good
from tests.barrage.case import Case
from tests.barrage.checks import Outcome, faults
from tests.barrage.child import become
from tests.barrage.leftovers import Snapshot, ended, leftovers, snapshot

#: A case may take so much longer, and so much more memory, than a good command that imports the same.
_MORE_S, _MORE_BYTES = 20.0, 1 << 30
_MOST_S = 120.0  # of the good command
#: On a machine that others use, a case has this factor of its time, unless it has used up that of the CPU.
_SHARED = 8
_MOST_TEXT = 1 << 20
_numbers = itertools.count(1)
_POLL_S = 0.005
_LIGHT = ("cli.main", *(f"cli.{name}" for name in (
    "calibrate", "check_model", "compare", "completion", "doctor", "explain", "generate", "history", "images", "init",
    "lm_eval", "ls", "plan", "report", "run", "schema", "validate")), "batch.generate", "hardware.calibration",
    "planning.explain", "planning.plan", "run.runner", "run.simulation", "run.options")  # fmt: skip
_IMPORTED = (*(f"harness.{name}" for name in _LIGHT), "engines.adapters.fake", "engines.planning.plan", "reports.build",
             "reports.compare", "reports.compare_formats", "reports.history", "suites.tasks")  # fmt: skip
#: torch's compiler last, which the engines do not ask for: it makes a folder in the temporary one, no case's.
_TORCH = ("torch", "transformers", "gguf", "engines.adapters.transformers", "engines.models.gguf_file",
          "engines.offload.engine", "torch._dynamo")  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """A case, how it ended, and what is wrong with that, by column."""

    outcome: Outcome
    faults: dict[str, str]


@dataclass
class _Running:
    case: Case
    folder: Path
    began: float
    before: Snapshot
    ready: float | None = None
    interrupted: bool = False


def run_cases(
    cases: Sequence[Case], jobs: int, tell: Callable[[Verdict], None], keep: Path | None = None
) -> list[Verdict]:
    """The verdicts on cases, each told as soon as it is known. `keep`: the folder that then has those of the cases.

    Raises RuntimeError where a good command does not end well: then nothing can be said of bad ones.
    """
    root = keep or Path(tempfile.mkdtemp(prefix="barrage-"))  # no TemporaryDirectory: forks would remove it
    root.mkdir(parents=True, exist_ok=True)
    verdicts: list[Verdict] = []
    try:
        for torch, modules in ((False, _IMPORTED), (True, _TORCH)):
            chosen = [case for case in cases if case.torch is torch]
            if not chosen:
                continue
            for module in modules:
                importlib.import_module(module)
            batch = _Batch(root.resolve(), _GOOD_TORCH if torch else _GOOD)
            verdicts += batch.run(chosen, jobs, tell, keep is not None)
    finally:
        if keep is None:
            shutil.rmtree(root, ignore_errors=True)
    return verdicts


#: Good commands: what they take of time and memory is allowed to bad ones, and more.
_GOOD = Case("good", "report", ("report", "rec"), codes=frozenset({0}))
_GOOD_TORCH = Case(
    "good", "generate", (*good.GENERATE, "--model", "model", "--engine", "transformers"), good.write_model,
    codes=frozenset({0}), torch=True,
)  # fmt: skip


class _Batch:
    """Runs cases that import the same, beside a good command that does."""

    def __init__(self, root: Path, good_case: Case) -> None:
        self._root = root
        self._charts: list[Path] = []
        self._most_s, self._most_bytes = _MOST_S, 1 << 62
        (outcome,) = self._outcomes([good_case], 1, keep=True)
        found = faults(outcome, self._most_bytes)
        if found:
            raise RuntimeError(f"a good command does not end well: {good_case.id}: {found}\n{outcome.err}")
        self._most_s, self._most_bytes = outcome.seconds + _MORE_S, outcome.peak_bytes + _MORE_BYTES
        # reports bundle the library of their charts once, in seconds
        self._charts = list(self._root.glob("good-*/work/cache/vega-*.js"))[:1]

    def run(self, cases: Sequence[Case], jobs: int, tell: Callable[[Verdict], None], keep: bool) -> list[Verdict]:
        """The verdicts on cases."""
        verdicts = []
        for outcome in self._outcomes(cases, jobs, keep):
            verdicts.append(Verdict(outcome, dict(faults(outcome, self._most_bytes))))
            tell(verdicts[-1])
        return verdicts

    def _outcomes(self, cases: Sequence[Case], jobs: int, keep: bool) -> Iterable[Outcome]:
        """How cases end, as they do."""
        waiting = deque(cases)
        running: dict[int, _Running] = {}
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    started = self._start(waiting.popleft())
                    running[started[0]] = started[1]
                for pid in list(running):
                    outcome = self._ended(pid, running[pid])
                    if outcome is not None:
                        folder = running.pop(pid).folder
                        yield outcome
                        if not keep:
                            shutil.rmtree(folder, ignore_errors=True)
                time.sleep(_POLL_S)
        finally:
            for pid, one in running.items():
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                ended(pid, one.folder.name)

    def _start(self, case: Case) -> tuple[int, _Running]:
        folder = self._root / f"{case.kind}-{next(_numbers):04d}-{os.getpid()}"
        for name in ("work", "tmp", "home"):
            (folder / name).mkdir(parents=True)
        good.write(folder / "work")
        for chart in self._charts:
            os.link(chart, folder / "work" / "cache" / chart.name)
        case.prepare(folder / "work")
        before = snapshot(folder / "work")
        pid = os.fork()
        if not pid:
            become(case, folder)
        return pid, _Running(case, folder, time.monotonic(), before)

    def _ended(self, pid: int, one: _Running) -> Outcome | None:
        """How a case ended; None while it runs. One that runs for too long is killed."""
        case, folder = one.case, one.folder
        done, status, usage = os.wait4(pid, os.WNOHANG)
        seconds = time.monotonic() - one.began
        if not done:
            if case.interrupt_s is not None and not one.interrupted:
                self._interrupt(pid, one)
            most_s = self._most_s * max(1, case.shell.count('"$@"'))  # it may start several commands
            if seconds < most_s or (seconds < _SHARED * most_s and _cpu_s(pid) < most_s):
                return None
            os.killpg(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            ended(pid, folder.name)
            return Outcome(case, -signal.SIGKILL, seconds, usage.ru_maxrss << 10, *_said(folder), hung=True)
        code = os.waitstatus_to_exitcode(status)
        code = 128 - code if code < 0 else code  # as a shell has it
        unheard = "/dev/full" in case.shell  # it may have done all but say so
        left = leftovers(folder, pid, 0 if unheard else code, one.before)
        return Outcome(case, code, seconds, usage.ru_maxrss << 10, *_said(folder), left=left)

    @staticmethod
    def _interrupt(pid: int, one: _Running) -> None:
        """Sends a case its signal when its time has come, counted from when it has handlers."""
        assert one.case.interrupt_s is not None
        if one.ready is None:
            one.ready = time.monotonic() if _has_handlers(pid) else None
        elif time.monotonic() - one.ready >= one.case.interrupt_s:
            one.interrupted = True
            os.kill(pid, one.case.stop)


def _cpu_s(pid: int) -> float:
    """Seconds of the CPU that a process has used, and those of its children that have ended."""
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0


def _has_handlers(pid: int) -> bool:
    """Whether a process handles SIGTERM: Python does not by itself, so the harness has begun."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False  # it has just ended


def _said(folder: Path) -> tuple[str, str]:
    """The beginnings of stdout and stderr."""
    texts = []
    for name in ("stdout", "stderr"):
        try:
            with (folder / name).open("rb") as file:
                texts.append(file.read(_MOST_TEXT).decode(errors="replace"))
        except FileNotFoundError:  # the case died before it had streams
            texts.append("")
    return texts[0], texts[1]
