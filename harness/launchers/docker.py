"""The `docker` launcher's sandbox: a worker in a container of its engine's image, through Docker's API."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import docker
import psutil
import requests
from docker.errors import APIError, DockerException, NotFound
from docker.types import DeviceRequest, LogConfig, Mount, Ulimit

from harness.api import EngineWork, Exchange, Outcome, Refusal, RunSpec, Status, UnsupportedError, WorkerRequest
from harness.common.regular_file import open_regular
from harness.launchers import images, mounts
from harness.launchers.images import engine_errors, reason
from harness.launchers.memory import container_group
from harness.launchers.owners import OWNER, owner, remove_abandoned
from harness.launchers.protocol import REQUEST, WORKER
from harness.launchers.sandbox import log_tail, opened, read_result, settings, watch

#: What the container engine, or the connection to it, raises.
_ERRORS = (DockerException, requests.RequestException)
#: The user and group of a worker if the harness runs as root.
_UNPRIVILEGED = 1000
_MAX_PROCESSES = 4096
_GONE_TIMEOUT_S = 20.0


class Containers:
    """The launcher `docker`. Raises HarnessError if no container engine answers.

    First removes the containers of harnesses that were killed.
    """

    def __init__(self, cache: Path) -> None:
        self._client = images.connect()
        self._cache = cache.resolve() / "containers"
        with engine_errors("containers"):
            version, info = self._client.version(), self._client.info()
            remove_abandoned(self._client)
        podman = "podman" in str(version.get("Components", "")).lower()
        self._engine = _Engine(
            f"{'Podman' if podman else 'Docker'} {version.get('Version', '')}",
            gives_gpus=not podman,
            limits_memory=bool(info.get("MemoryLimit", True)),
            rootless=any("rootless" in option for option in info.get("SecurityOptions") or ()),
        )

    def sandbox(self, spec: RunSpec, exchange: Exchange) -> ContainerSandbox:
        name = images.image_of(spec)
        if spec.limits.gpu and not self._engine.gives_gpus:
            raise UnsupportedError("Podman's API passes no GPU to a container: use Docker, or --launcher process")
        if spec.limits.host_memory is not None and not self._engine.limits_memory:
            raise UnsupportedError("this container engine cannot limit memory (no such cgroup): use --launcher process")
        with engine_errors(f"no image {name} ({images.remedy(spec)})"):
            image = self._client.images.get(name)  # before any run, which would try to download a missing image
        images.check(image, name, spec)
        return ContainerSandbox(self._client, self._engine, name, image.id, self._cache)


@dataclass(frozen=True)
class _Engine:
    """A container engine: its name and version, and what it can do."""

    name: str
    gives_gpus: bool
    limits_memory: bool
    rootless: bool


@dataclass
class _Watched:
    """How a container ended: its exit code, or why the connection to the engine was lost."""

    exit_code: int | None = None
    lost: str = ""


@dataclass
class ContainerSandbox:
    """Runs the worker of an image without network, privileges or root; the model is mounted read-only."""

    inherits_environment = False

    client: docker.DockerClient
    engine: _Engine
    name: str
    image: str
    cache: Path
    locks_memory: bool = True

    def identity(self) -> Mapping[str, str]:
        return {"image": self.name, "image_digest": self.image, "container_engine": self.engine.name}

    def run(self, request: WorkerRequest) -> Outcome:
        user = os.getuid() or _UNPRIVILEGED
        group = os.getgid() if os.getuid() else _UNPRIVILEGED
        # a rootless engine maps root to the user that runs it; its other users own no file on this host
        inside = "0:0" if self.engine.rootless else f"{user}:{group}"
        work = request.work
        assert isinstance(work, EngineWork)
        if not self.engine.rootless and (unreadable := mounts.unreadable(work, user, group)):
            return _refused("error", f"{unreadable} is not readable by the container's user {user}: chmod a+r it")
        work, mounted = mounts.translated(work, request.exchange.folder, self.cache)
        request = replace(request, work=work)

        def attempt(log_start: int) -> Outcome:
            try:
                container = self._create(request, mounted, inside)
            except _ERRORS as exc:
                return _refused("error", f"the container engine refuses: {reason(exc)}")
            try:
                return self._run(container, request, log_start)
            finally:
                _remove(container)

        # the worker's parent is the container's init
        with opened(request, 1) as log_start:
            self.cache.mkdir(parents=True, exist_ok=True)
            if os.getuid() == 0:
                # only these, not their content: a container may have left links to any file in the cache
                folder = request.exchange.folder
                for path in (self.cache, folder, folder / REQUEST):
                    os.chown(path, user, group, follow_symlinks=False)
            outcome = attempt(log_start)
            if self.locks_memory and outcome.refusal and "rlimit" in outcome.refusal.reason:
                self.locks_memory = False  # an unprivileged container engine cannot raise the limit
                outcome = attempt(log_start)
            return outcome

    def _create(self, request: WorkerRequest, mounted: list[Mount], user: str) -> Any:
        options: dict[str, Any] = {}
        if request.limit_bytes is not None:
            options |= {"mem_limit": request.limit_bytes, "memswap_limit": request.limit_bytes}
        if request.threads is not None:
            options["nano_cpus"] = min(request.threads, os.cpu_count() or 1) * 10**9
        # a child process would inherit this process's affinity; a container does not
        if len(usable := os.sched_getaffinity(0)) < (os.cpu_count() or 1):
            options["cpuset_cpus"] = ",".join(map(str, sorted(usable)))
        if self.locks_memory:  # pinned buffers are locked memory, which the cgroup bounds too
            options["ulimits"] = [Ulimit(name="memlock", soft=-1, hard=-1)]
        if request.gpu:
            options["device_requests"] = [devices()]
        return self.client.containers.create(
            self.image,
            entrypoint=["python", "-P", "-m", WORKER],
            command=[mounts.WORK],
            environment=settings(request.threads, request.gpu, request.env) | {"HOME": "/tmp"},
            labels={OWNER: owner()},
            mounts=mounted,
            user=user,
            init=True,
            network_mode="none",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges", "label=disable"],  # SELinux would hide the mounts
            pids_limit=_MAX_PROCESSES,
            working_dir="/tmp",
            log_config=LogConfig(type=LogConfig.types.JSON, config={"max-size": "64m", "max-file": "1"}),
            **options,
        )

    def _run(self, container: Any, request: WorkerRequest, log_start: int) -> Outcome:
        try:
            container.start()
            container.reload()
        except _ERRORS as exc:
            if "could not select device driver" in reason(exc):
                return _refused("unsupported", "this container engine offers no GPU: install the vendor's runtime")
            return _refused("error", f"the container did not start: {reason(exc)}")
        pid = int(container.attrs["State"]["Pid"])
        group = container_group(pid, container.id)
        watched = _Watched()
        log = request.exchange.log
        logging = threading.Thread(target=_log, args=(container, log), daemon=True)
        waiting = threading.Thread(target=_wait, args=(container, watched), daemon=True)
        logging.start()
        waiting.start()

        def ended() -> bool:
            if group:
                group.read()
            return not waiting.is_alive()

        timed_out = watch(request, ended)
        if timed_out:
            _kill(container, pid)
        logging.join(_GONE_TIMEOUT_S)
        waiting.join(_GONE_TIMEOUT_S)
        killed = _killed_for_memory(container)
        if watched.lost and not killed:
            _kill(container, pid)
        return Outcome(
            None if timed_out or watched.lost else read_result(request.exchange.folder),
            exit_code(watched.exit_code),
            timed_out,
            max(group.oom_kills() if group else 0, int(killed)),
            group.peak_bytes() if group else None,
            f"container, {group.method}" if group else "container",
            True,
            log_tail(log, log_start),
            Refusal("error", watched.lost) if watched.lost and not timed_out else None,
        )


def devices() -> DeviceRequest:
    """The devices that a child process would see."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return DeviceRequest(device_ids=visible.split(","), capabilities=[["gpu"]])
    return DeviceRequest(count=-1, capabilities=[["gpu"]])


def _log(container: Any, log: Path) -> None:
    """Streams the container's output to the log. If the engine dies, the stream just ends, and `_wait` reports it."""
    with contextlib.suppress(*_ERRORS, OSError), open_regular(log, "ab", follow=False) as sink:
        for piece in container.logs(stream=True, follow=True):
            sink.write(piece)
            sink.flush()


def _wait(container: Any, watched: _Watched) -> None:
    """Waits for the container's end, without a timeout: if the engine dies, the connection ends."""
    try:
        watched.exit_code = int(container.wait()["StatusCode"])
    except _ERRORS as exc:
        watched.lost = f"the container engine was lost while the cell ran: {reason(exc)}"


def exit_code(status: int | None) -> int:
    """The exit code as for a process: the container's init reports 128 plus the number of a signal that killed it."""
    if status is None:
        return -signal.SIGKILL
    return 128 - status if 128 < status < 128 + signal.NSIG else status


def _kill(container: Any, pid: int) -> None:
    """Kills a container through the engine, or its processes if the engine does not answer."""
    with contextlib.suppress(*_ERRORS):
        container.kill()
        return
    with contextlib.suppress(OSError, psutil.Error):
        # this host may have reused the pid, but then for a process of another pid namespace than a container's
        if pid > 1 and Path(f"/proc/{pid}/ns/pid").readlink() != Path("/proc/self/ns/pid").readlink():
            for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
                process.kill()


def _killed_for_memory(container: Any) -> bool:
    """Whether the engine reports an OOM kill; Podman never does."""
    with contextlib.suppress(*_ERRORS):
        container.reload()
        return bool(container.attrs["State"].get("OOMKilled"))
    return False


def _remove(container: Any) -> None:
    """Removes a container in any state. If the engine is gone, the next run's clean-up removes it."""
    deadline = time.monotonic() + _GONE_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            container.remove(force=True)
            return
        except NotFound:
            return
        except APIError:  # already being removed, or a file of it is busy
            time.sleep(0.2)
        except _ERRORS:
            return


def _refused(status: Status, reason: str) -> Outcome:
    return Outcome(None, 1, cap_method="container", counts_page_cache=True, refusal=Refusal(status, reason))
