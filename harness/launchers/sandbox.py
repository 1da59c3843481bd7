"""Runs one worker process inside a memory group and watches it to its end, whatever that is."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from harness import provenance
from harness.api import EventSink, HarnessError
from harness.launchers.memory import make_group
from harness.worker import EVENTS, REQUEST, RESULT

_POLL_S = 0.05
_LOG_TAIL_LINES = 3


@dataclass(frozen=True)
class Task:
    """A request for `harness.worker`: its JSON body, its exchange folder (made and removed), its log, its limits."""

    body: dict[str, Any]
    workdir: Path
    log: Path
    timeout_s: float
    limit_bytes: int | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How a worker process ended: the evidence. `result` is what it wrote, None if it did not live to."""

    result: dict[str, Any] | None
    exit_code: int
    timed_out: bool
    oom_kills: int
    peak_bytes: int | None
    cap_method: str
    counts_page_cache: bool
    log_tail: str


def ignore_events(phase: str, done: int, total: int) -> None:
    """An event sink for processes nobody watches."""


def run_task(task: Task, on_event: EventSink = ignore_events) -> Outcome:
    """Starts the worker and returns when it and its children are gone, KeyboardInterrupt included.

    Raises HarnessError where the exchange folder or the log cannot be written.
    """
    shutil.rmtree(task.workdir, ignore_errors=True)
    group = make_group(task.limit_bytes)
    try:
        task.workdir.mkdir(parents=True)
        (task.workdir / REQUEST).write_text(json.dumps(task.body | {"parent": os.getpid()}))
        with task.log.open("ab") as sink:
            sink.write(f"=== {task.body['kind']} {provenance.now()}\n".encode())
            log_start = sink.tell()
            # -P: a folder named like one of our packages in the user's directory must not shadow it
            command = group.wrap([sys.executable, "-P", "-m", "harness.worker", str(task.workdir)])
            try:
                process = _start(command, sink, task.threads)
            except OSError as exc:
                raise HarnessError(
                    f"cannot start a worker process: {exc.strerror}; is a limit on them reached?"
                ) from exc
        try:
            group.adopt(process.pid)
            timed_out = _watch(process, task, on_event)
        finally:
            # The session first (it is known at once), then whatever left it but is still in the group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            group.kill()
            exit_code = process.wait()
        return Outcome(
            _result(task.workdir / RESULT),
            exit_code,
            timed_out,
            group.oom_kills(),
            group.peak_bytes(),
            group.method,
            group.counts_page_cache,
            _tail(task.log, log_start),
        )
    except OSError as exc:
        where = exc.filename or task.workdir
        hint = "free space" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else "choose another --out"
        raise HarnessError(f"cannot write to {where}: {exc.strerror}; {hint}") from exc
    finally:
        group.close()
        shutil.rmtree(task.workdir, ignore_errors=True)


def _start(command: list[str], sink: BinaryIO, threads: int | None) -> subprocess.Popen[bytes]:
    settings = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if threads is not None:
        settings |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=subprocess.STDOUT,
        env=os.environ | settings,
        start_new_session=True,
    )


def _watch(process: subprocess.Popen[bytes], task: Task, on_event: EventSink) -> bool:
    """Delivers events until the process ends or its time is over; returns whether it was the latter."""
    deadline = time.monotonic() + task.timeout_s
    events = _follow(task.workdir / EVENTS)
    while True:
        ended = process.poll() is not None
        for event in next(events):
            on_event(event["phase"], event["done"], event["total"])
        if ended:
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(_POLL_S)


def _follow(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Yields, at each call of next, the complete new lines of a growing JSON-lines file."""
    position = 0
    while True:
        lines: list[dict[str, Any]] = []
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                position += len(line)
                lines.append(json.loads(line))
        yield lines


def _result(path: Path) -> dict[str, Any] | None:
    """What the worker wrote: all of it or nothing, for it renames the file into place."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _tail(log: Path, offset: int) -> str:
    with log.open("rb") as file:
        file.seek(offset)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "Fatal" in line]  # below them stand only addresses
    return " | ".join(telling[-1:] or lines[-_LOG_TAIL_LINES:])[:800] or "(none)"
