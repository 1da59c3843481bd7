"""A worker as a process of this host, in a memory group, by any Python interpreter."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from harness.api import Exchange, HarnessError, Outcome, RunSpec, WorkerRequest
from harness.launchers.memory import make_group
from harness.launchers.protocol import WORKER
from harness.launchers.sandbox import log_tail, opened, read_result, settings, watch


class ProcessSandbox:
    """Runs workers by `python`. `packages`: the folder in which another interpreter finds this code."""

    inherits_environment = True

    def __init__(self, python: str = sys.executable, packages: Path | None = None, identity: str = "") -> None:
        self._python = python
        self._packages = packages
        self._identity = identity

    def identity(self) -> Mapping[str, str]:
        return {"environment": self._identity} if self._identity else {}

    def run(self, request: WorkerRequest) -> Outcome:
        group, exchange = make_group(request.limit_bytes), request.exchange
        try:
            with opened(request, os.getpid()) as log_start:
                process = self._start(request, group.wrap(self._command(exchange.folder)))
                try:
                    group.adopt(process.pid)
                    timed_out = watch(request, lambda: process.poll() is not None)
                finally:
                    # The session first: its id is known at once. Then processes of the group that left the session.
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    group.kill()
                    exit_code = process.wait()
                return Outcome(
                    read_result(exchange.folder),
                    exit_code,
                    timed_out,
                    group.oom_kills(),
                    group.peak_bytes(),
                    group.method,
                    group.counts_page_cache,
                    log_tail(exchange.log, log_start),
                )
        finally:
            group.close()

    def _command(self, folder: Path) -> list[str]:
        # -P: a folder in the user's directory that is named like one of our packages must not shadow it
        return [self._python, "-P", "-m", WORKER, str(folder)]

    def _start(self, request: WorkerRequest, command: list[str]) -> subprocess.Popen[bytes]:
        environment, log = os.environ | settings(request.threads, request.gpu), request.exchange.log
        if self._packages is not None:
            environment["PYTHONPATH"] = str(self._packages)
        try:
            with log.open("ab") as sink:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as exc:
            if exc.filename == str(log):
                raise
            raise HarnessError(f"cannot start a worker process: {exc.strerror}; is a limit on them reached?") from exc


class Processes:
    """The launcher `process`: workers are processes of the harness's own interpreter."""

    def __init__(self, cache: Path) -> None: ...

    def sandbox(self, spec: RunSpec, exchange: Exchange) -> ProcessSandbox:
        return ProcessSandbox()
