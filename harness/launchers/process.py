"""A worker as a process of this host, in a memory group and perhaps a network of its ranks, by any Python
interpreter."""

import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.api import Exchange, HarnessError, Outcome, Refusal, RunSpec, WorkerRequest
from harness.common.regular_file import open_regular
from harness.common.server_containers import remove_containers
from harness.launchers.links.network import Network, network
from harness.launchers.memory import make_group
from harness.launchers.protocol import WORKER
from harness.launchers.sandbox import log_tail, opened, read_result, settings, watch

#: Where this code's packages are.
_CODE = Path(__file__).parents[2]


@dataclass(frozen=True)
class ProcessSandbox:
    """Runs workers by `python`. `packages`: the folder in which another interpreter finds this code; `environment`: the
    identity of its packages."""

    inherits_environment = True

    python: str = sys.executable
    packages: Path | None = None
    environment: str = ""

    def identity(self) -> Mapping[str, str]:
        return {"environment": self.environment} if self.environment else {}

    def run(self, request: WorkerRequest) -> Outcome:
        with ExitStack() as resources:
            linked, began = None, time.monotonic()
            if request.link is not None:
                try:
                    linked = resources.enter_context(network(request.link, request.ranks, request.timeout_s))
                except Refusal as refusal:
                    return Outcome(None, 0, refusal=refusal)
                spent = time.monotonic() - began  # of the launch's time
                request = replace(request, timeout_s=max(0.0, request.timeout_s - spent))
            return self._run(request, linked)

    def _run(self, request: WorkerRequest, linked: Network | None) -> Outcome:
        exchange, made = request.exchange, make_group(request.limit_bytes, request.ranks)
        with closing(made) as group, opened(request, os.getpid()) as log_start:
            # -P: a folder in the user's directory that is named like one of our packages must not shadow it
            command = [self.python, "-P", "-m", WORKER, str(exchange.folder)]
            env = group.env
            if linked is not None:
                command, env = linked.wrap(command), {**env, **linked.env}
            process = self._start(request, group.wrap(command), env)
            try:
                group.adopt(process.pid)
                timed_out = watch(request, lambda: process.poll() is not None)
            finally:
                # The session first: its id is known at once. Then processes of the group that left the session.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                group.kill()
                exit_code = process.wait()
                remove_containers(exchange.folder / "scratch")
            return Outcome(
                read_result(exchange.folder),
                exit_code,
                timed_out,
                group.oom_kills(),
                group.peak_bytes(),
                group.method,
                group.counts_page_cache,
                log_tail(exchange.log, log_start),
                measurements=linked.measurements if linked else (),
            )

    def _start(self, request: WorkerRequest, command: list[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        environment, log = os.environ | settings(request.threads, request.gpu, request.env), request.exchange.log
        environment |= env
        if self.packages is not None:
            environment["PYTHONPATH"] = str(self.packages)
        elif Path(sysconfig.get_path("purelib")) != _CODE:  # a checkout: perhaps not the one that is installed here
            environment["PYTHONPATH"] = os.pathsep.join([str(_CODE), *filter(None, [environment.get("PYTHONPATH")])])
        try:
            with open_regular(log, "ab", follow=False) as sink:
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
