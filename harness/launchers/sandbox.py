"""What every sandbox shares: the task it is given, the folder it is exchanged through, and how it ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.api import EventSink, HarnessError, RunSpec, Status
from harness.hardware import provenance
from harness.launchers.protocol import EVENTS, REQUEST, RESULT

_POLL_S = 0.05
#: How long after its time a worker ends by itself, where nobody ended it.
_GRACE_S = 60.0
_LOG_TAIL_LINES = 3


@dataclass(frozen=True)
class Task:
    """A request for the worker: its JSON body, its exchange folder (made and removed), its log, its limits."""

    body: dict[str, Any]
    workdir: Path
    log: Path
    timeout_s: float
    limit_bytes: int | None = None
    threads: int | None = None
    gpu: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a worker ended: the evidence. `result` is what it wrote, None if it did not live to.

    `refused`: it was never started, or its end is known from elsewhere than from the worker; status and reason.
    """

    result: dict[str, Any] | None
    exit_code: int
    timed_out: bool
    oom_kills: int
    peak_bytes: int | None
    cap_method: str
    counts_page_cache: bool
    log_tail: str
    refused: tuple[Status, str] | None = None


class Sandbox(Protocol):
    """A place where a worker runs, with packages of its own and within a task's limits."""

    def run(self, task: Task, on_event: EventSink) -> Outcome:
        """Returns when the worker and its children are gone, KeyboardInterrupt included. Raises HarnessError where
        the exchange folder or the log cannot be written."""
        ...

    def identity(self) -> Mapping[str, str]:
        """What the worker runs in: for records, and to know remembered results of another one from its own."""
        ...


class Sandboxes(Protocol):
    """Sandboxes of one kind."""

    def of(self, spec: RunSpec, log: Path, on_event: EventSink) -> Sandbox:
        """A cell's, made ready. Raises HarnessError where it cannot be: the cell is then recorded with it."""
        ...


def ignore_events(phase: str, done: int, total: int) -> None:
    """An event sink for workers nobody watches."""


def settings(threads: int | None, gpu: bool) -> dict[str, str]:
    """Environment variables of a worker. One that is to use no device sees none: engines would take it unasked."""
    found = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
    }
    if threads is not None:
        found |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return found | ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpu else {"CUDA_VISIBLE_DEVICES": ""})


@contextlib.contextmanager
def exchange(task: Task, parent: int, body: Mapping[str, Any] | None = None) -> Iterator[int]:
    """The exchange folder with its request, for as long as the worker lives; gives where its part of the log begins.

    `parent` is the process without which the worker shall not go on, as the worker sees it; `body` the task's in the
    words of another file system. Raises HarnessError for what cannot be written.
    """
    shutil.rmtree(task.workdir, ignore_errors=True)
    try:
        task.workdir.mkdir(parents=True)
        longest = task.timeout_s + _GRACE_S
        request = dict(task.body if body is None else body) | {"parent": parent, "longest_s": longest}
        (task.workdir / REQUEST).write_text(json.dumps(request))
        with task.log.open("ab") as sink:
            sink.write(f"=== {task.body['kind']} {provenance.now()}\n".encode())
            start = sink.tell()
        yield start
    except OSError as exc:
        where = exc.filename or task.workdir
        option = "--cache-dir" if str(where).startswith(str(task.workdir)) else "--out"
        hint = "free space" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else f"choose another {option}"
        raise HarnessError(f"cannot write to {where}: {exc.strerror}; {hint}") from exc
    finally:
        shutil.rmtree(task.workdir, ignore_errors=True)


def watch(task: Task, ended: Callable[[], bool], on_event: EventSink) -> bool:
    """Delivers events until the worker has `ended` or its time is over; returns whether it was the latter."""
    deadline = time.monotonic() + task.timeout_s
    events = _follow(task.workdir / EVENTS)
    while True:
        over = ended()
        for event in next(events):
            on_event(event["phase"], event["done"], event["total"])
        if over:
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(_POLL_S)


def result_of(task: Task) -> dict[str, Any] | None:
    """What the worker wrote: all of it or nothing, for it renames the file into place."""
    try:
        found = json.loads(_plain(task.workdir / RESULT))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def log_tail(log: Path, offset: int) -> str:
    """The most telling end of a log from `offset`, as one line."""
    with log.open("rb") as file:
        file.seek(offset)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "Fatal" in line]  # below them stand only addresses
    return " | ".join(telling[-1:] or lines[-_LOG_TAIL_LINES:])[:800] or "(none)"


def _follow(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yields, at each call of next, the complete new lines of a growing JSON-lines file."""
    position = 0
    while True:
        lines: list[dict[str, Any]] = []
        with contextlib.suppress(OSError, ValueError):
            for line in _plain(path, position).splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                position += len(line)
                lines.append(json.loads(line))
        yield lines


def _plain(path: Path, offset: int = 0) -> bytes:
    """A file's bytes. Raises OSError for a link or a pipe: a container may put one where the harness reads."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        file.seek(offset)
        return file.read()
