"""A worker as a process of this host, in a memory group, by any Python interpreter."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from harness.api import EventSink, HarnessError, RunSpec
from harness.launchers.memory import make_group
from harness.launchers.protocol import WORKER
from harness.launchers.sandbox import Outcome, Task, exchange, ignore_events, log_tail, result_of, settings, watch


class ProcessSandbox:
    """Runs the worker. `packages` is where another interpreter finds this code, None for our own."""

    def __init__(self, python: str = sys.executable, packages: Path | None = None, identity: str = "") -> None:
        self._python = python
        self._packages = packages
        self._identity = identity

    def identity(self) -> Mapping[str, str]:
        return {"environment": self._identity} if self._identity else {}

    def run(self, task: Task, on_event: EventSink = ignore_events) -> Outcome:
        group = make_group(task.limit_bytes)
        try:
            with exchange(task, os.getpid()) as log_start:
                process = self._start(task, group.wrap(self._command(task)))
                try:
                    group.adopt(process.pid)
                    timed_out = watch(task, lambda: process.poll() is not None, on_event)
                finally:
                    # The session first (it is known at once), then whatever left it but is still in the group.
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    group.kill()
                    exit_code = process.wait()
                return Outcome(
                    result_of(task),
                    exit_code,
                    timed_out,
                    group.oom_kills(),
                    group.peak_bytes(),
                    group.method,
                    group.counts_page_cache,
                    log_tail(task.log, log_start),
                )
        finally:
            group.close()

    def _command(self, task: Task) -> list[str]:
        # -P: a folder named like one of our packages in the user's directory must not shadow it
        return [self._python, "-P", "-m", WORKER, str(task.workdir)]

    def _start(self, task: Task, command: list[str]) -> subprocess.Popen[bytes]:
        environment = os.environ | settings(task.threads, task.gpu)
        if self._packages is not None:
            environment["PYTHONPATH"] = str(self._packages)
        try:
            with task.log.open("ab") as sink:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as exc:
            if exc.filename == str(task.log):
                raise
            raise HarnessError(f"cannot start a worker process: {exc.strerror}; is a limit on them reached?") from exc


class Processes:
    """One sandbox for all: processes of this interpreter."""

    def of(self, spec: RunSpec, log: Path, on_event: EventSink) -> ProcessSandbox:
        return ProcessSandbox()
