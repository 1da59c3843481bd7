"""A Ray cluster made of SLURM jobs by submitit: its head runs on this host, and each job is a node of it."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.api import HarnessError, first_line
from harness.cluster.connection import AUTO, Cluster, answers, connected, signals_held
from harness.common.files import os_errors
from harness.common.packages import install_extra
from harness.common.scratch import scratch_folder

#: How long the head may take to start, how often the queue is looked at, and how long the head gets to end, in seconds.
_START_S, _LOOK_S, _END_S = 60.0, 1.0, 10.0
#: A node of Ray in the foreground; Linux ends it with the process that started it.
_TIED = "import ctypes; ctypes.CDLL(None).prctl(1, 15); from ray.scripts.scripts import main; main()"


@dataclass(frozen=True)
class Allocation:
    """So many jobs, on SLURM or, as submitit's `cluster`, on this host (local), with these parameters of submitit's."""

    nodes: int
    cluster: str | None
    parameters: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> "Allocation":
        """The allocation of `KEY=VALUE,...`. Raises HarnessError."""
        given: dict[str, Any] = {}
        for pair in text.split(","):
            key, equals, value = pair.partition("=")
            if not (equals and key.isidentifier()):
                raise HarnessError(f"--slurm {text}: expected KEY=VALUE,... such as nodes=4,cpus_per_task=16")
            given[key] = int(value) if value.isdecimal() else value
        nodes = given.pop("nodes", 1)
        if not isinstance(nodes, int) or nodes < 1:
            raise HarnessError(f"--slurm {text}: nodes is {nodes}; it must be at least 1")
        return cls(nodes, given.pop("cluster", None), given)


def cluster_at(
    ray: str | None, slurm: str | None, cache: Path, note: Callable[[str], None]
) -> AbstractContextManager[Cluster]:
    """The cluster of `--ray`, or that of `--slurm`."""
    return connected(ray or AUTO) if slurm is None else allocated(slurm, cache, note)


@contextmanager
def allocated(text: str, cache: Path, note: Callable[[str], None]) -> Iterator[Cluster]:
    """A cluster of the jobs that `text` describes, once all run that have not failed; all end with the context.

    Their logs are in `cache`/slurm, which the jobs' hosts must see too. Raises HarnessError where submitit is missing
    or refuses a parameter, and where every job ends before it is a node.
    """
    asked = Allocation.parse(text)
    if importlib.util.find_spec("submitit") is None or importlib.util.find_spec("ray") is None:
        raise HarnessError(f"--slurm needs submitit and Ray: {install_extra('slurm')}")
    import submitit

    with ExitStack() as opened:
        with os_errors(f"cannot write {cache}", "choose another --cache-dir"):
            scratch = opened.enter_context(scratch_folder(cache))
        try:
            executor = submitit.AutoExecutor(cache.absolute() / "slurm", cluster=asked.cluster)
            executor.update_parameters(name="harness", **asked.parameters)
        except Exception as exc:  # submitit has no class of its own for what it does not know
            raise HarnessError(f"--slurm {text}: {first_line(exc)}") from exc
        cluster = opened.enter_context(connected(opened.enter_context(_head(scratch))))
        jobs: list[Any] = []
        opened.callback(_cancel, jobs)  # also those that were submitted before one was refused
        try:
            for _ in range(asked.nodes):
                jobs.append(executor.submit(serve, cluster.head, asked.parameters.get("cpus_per_task")))
        except Exception as exc:  # submitit's own, of no common class
            raise HarnessError(f"--slurm {text}: {first_line(exc)}") from exc
        _wait_for_nodes(cluster, jobs, note)
        yield cluster


def _cancel(jobs: list[Any]) -> None:
    for job in jobs:
        with suppress(Exception):  # it has ended
            job.cancel()


def serve(address: str, cores: int | None) -> int:
    """What a job does: it is a node of the cluster at `address`, with so many cores, until one of both ends."""
    options = ["--address", address, "--block", *([f"--num-cpus={cores}"] if cores else [])]
    return subprocess.run([sys.executable, "-c", _TIED, "start", *options], check=False).returncode


def _wait_for_nodes(cluster: Cluster, jobs: list[Any], note: Callable[[str], None]) -> None:
    """Until all jobs are nodes but those that have ended, whatever the queue takes."""
    note(f"jobs submitted: {', '.join(str(job.job_id) for job in jobs)}")
    while living := sum(not job.done() for job in jobs):
        if sum(node.resources.get("CPU", 0) > 0 for node in cluster.nodes()) >= living:
            return
        time.sleep(_LOOK_S)
    raise HarnessError(f"no job became a node of the cluster; the first one's log is {jobs[0].paths.stderr}")


@contextmanager
def _head(scratch: Path) -> Iterator[str]:
    """The address of a head without cores: nothing is computed on this host."""
    with signals_held():
        import ray

    with closing(socket.socket()) as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    address = f"{ray.util.get_node_ip_address()}:{port}"
    options = ["--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false", "--disable-usage-stats"]
    with (scratch / "head.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _TIED, "start", "--block", *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the command, which ends the head last
        )
    try:
        deadline = time.monotonic() + _START_S
        while not answers(address):
            if process.poll() is not None or time.monotonic() > deadline:
                lines = (scratch / "head.log").read_text(errors="replace").strip().splitlines()
                raise HarnessError(f"the head of a Ray cluster did not start here: {lines[-1] if lines else 'no word'}")
            time.sleep(_LOOK_S)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
