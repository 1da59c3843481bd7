"""The `docker` launcher's sandbox: a worker in a container of its engine's image, through Docker's API."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import docker
import psutil
import requests
from docker.errors import APIError, DockerException, NotFound
from docker.types import DeviceRequest, LogConfig, Mount, Ulimit

from harness.api import (
    EngineWork,
    Exchange,
    MeasureIdle,
    Outcome,
    Refusal,
    RunSpec,
    Status,
    UnsupportedError,
    Work,
    WorkerRequest,
)
from harness.launchers import images
from harness.launchers.images import engine_errors, reason
from harness.launchers.memory import container_group
from harness.launchers.protocol import REQUEST, WORKER
from harness.launchers.sandbox import log_tail, opened, read_result, settings, watch

#: The label with a container's owner: host, process namespace, process id, and start time of that process.
OWNER = "offload-harness.owner"
_OWNER = re.compile(r"(?P<host>.*)/(?P<space>.*)/(?P<pid>\d+)@(?P<began>.*)")
#: Paths in a container: the exchange folder, the cache, the model's files, and other input files.
_WORK, _CACHE, _MODEL, _INPUTS = "/harness/work", "/harness/cache", "/harness/model", "/harness/inputs"
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
        if spec.limits.device_memory is not None and not self._engine.gives_gpus:
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
    """Results of the threads that watch a container: its exit code, or why the connection to the engine was lost."""

    exit_code: int | None = None
    lost: str = ""
    over: threading.Event = field(default_factory=threading.Event)


class ContainerSandbox:
    """Runs the worker of an image without network, privileges or root; the model is mounted read-only."""

    inherits_environment = False

    def __init__(self, client: docker.DockerClient, engine: _Engine, name: str, image: str, cache: Path) -> None:
        self._client = client
        self._engine = engine
        self._name = name
        self._image = image
        self._cache = cache
        self._locks_memory = True

    def identity(self) -> Mapping[str, str]:
        return {"image": self._name, "image_digest": self._image, "container_engine": self._engine.name}

    def run(self, request: WorkerRequest) -> Outcome:
        user = os.getuid() or _UNPRIVILEGED
        group = os.getgid() if os.getuid() else _UNPRIVILEGED
        # a rootless engine maps root to the user that runs it; its other users own no file on this host
        inside = "0:0" if self._engine.rootless else f"{user}:{group}"
        if not self._engine.rootless and (unreadable := _unreadable(request.work, user, group)):
            return _refused("error", f"{unreadable} is not readable by the container's user {user}: chmod a+r it")
        work, mounts = _translated(request, self._cache)

        def attempt(log_start: int) -> Outcome:
            try:
                container = self._create(request, mounts, inside)
            except (DockerException, requests.RequestException) as exc:
                return _refused("error", f"the container engine refuses: {reason(exc)}")
            try:
                return self._run(container, request, log_start)
            finally:
                _remove(container)

        # the worker's parent is the container's init
        with opened(request, 1, work) as log_start:
            self._cache.mkdir(parents=True, exist_ok=True)
            if os.getuid() == 0:
                # only these, not their content: a container may have left links to any file in the cache
                folder = request.exchange.folder
                for path in (self._cache, folder, folder / REQUEST):
                    os.chown(path, user, group, follow_symlinks=False)
            outcome = attempt(log_start)
            if self._locks_memory and outcome.refusal and "rlimit" in outcome.refusal.reason:
                self._locks_memory = False  # an unprivileged container engine cannot raise the limit
                outcome = attempt(log_start)
            return outcome

    def _create(self, request: WorkerRequest, mounts: list[Mount], user: str) -> Any:
        limit_bytes = request.limit_bytes
        limit = {} if limit_bytes is None else {"mem_limit": limit_bytes, "memswap_limit": limit_bytes}
        cores: dict[str, Any] = {}
        if request.threads is not None:
            cores["nano_cpus"] = min(request.threads, os.cpu_count() or 1) * 10**9
        # a child process would inherit this process's affinity; a container does not
        if len(usable := os.sched_getaffinity(0)) < (os.cpu_count() or 1):
            cores["cpuset_cpus"] = ",".join(map(str, sorted(usable)))
        # pinned buffers are locked memory, which the cgroup bounds too
        locked = [Ulimit(name="memlock", soft=-1, hard=-1)] if self._locks_memory else []
        gpus = {"device_requests": [_devices()]} if request.gpu else {}
        return self._client.containers.create(
            self._image,
            entrypoint=["python", "-P", "-m", WORKER],
            command=[_WORK],
            environment=settings(request.threads, request.gpu) | {"HOME": "/tmp"},
            labels={OWNER: _owner()},
            mounts=mounts,
            user=user,
            init=True,
            network_mode="none",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges", "label=disable"],  # SELinux would hide the mounts
            pids_limit=_MAX_PROCESSES,
            ulimits=locked,
            working_dir="/tmp",
            log_config=LogConfig(type=LogConfig.types.JSON, config={"max-size": "64m", "max-file": "1"}),
            **limit,
            **cores,
            **gpus,
        )

    def _run(self, container: Any, request: WorkerRequest, log_start: int) -> Outcome:
        try:
            container.start()
            container.reload()
        except (DockerException, requests.RequestException) as exc:
            if "could not select device driver" in reason(exc):
                return _refused("unsupported", "this container engine offers no GPU: install the vendor's runtime")
            return _refused("error", f"the container did not start: {reason(exc)}")
        pid = int(container.attrs["State"]["Pid"])
        group = container_group(pid, container.id)
        watched = _Watched()
        log = request.exchange.log
        streams = [
            threading.Thread(target=_log, args=(container, log), daemon=True),
            threading.Thread(target=_wait, args=(container, watched), daemon=True),
        ]
        for stream in streams:
            stream.start()

        def ended() -> bool:
            if group:
                group.read()
            return watched.over.is_set()

        timed_out = watch(request, ended)
        if timed_out:
            _kill(container, pid)
        for stream in streams:
            stream.join(_GONE_TIMEOUT_S)
        killed = _killed_for_memory(container)
        if watched.lost and not killed:
            _kill(container, pid)
        return Outcome(
            None if timed_out or watched.lost else read_result(request.exchange.folder),
            _exit_code(watched.exit_code),
            timed_out,
            max(group.oom_kills() if group else 0, int(killed)),
            group.peak_bytes() if group else None,
            f"container, {group.method}" if group else "container",
            True,
            log_tail(log, log_start),
            Refusal("error", watched.lost) if watched.lost and not timed_out else None,
        )


def _devices() -> DeviceRequest:
    """The devices that a child process would see."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return DeviceRequest(device_ids=visible.split(","), capabilities=[["gpu"]])
    return DeviceRequest(count=-1, capabilities=[["gpu"]])


def remove_abandoned(client: docker.DockerClient) -> list[str]:
    """Removes containers of harnesses of this host that no longer run; returns their names."""
    removed = []
    for container in client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
        owner = _OWNER.fullmatch(container.labels[OWNER])
        this_host = (platform.node(), _space())
        if owner and (owner["host"], owner["space"]) == this_host and not _lives(int(owner["pid"]), owner["began"]):
            with contextlib.suppress(DockerException):
                container.remove(force=True)
                removed.append(container.name)
    return removed


def _owner() -> str:
    return f"{platform.node()}/{_space()}/{os.getpid()}@{_began(os.getpid())}"


def _space() -> str:
    """This process's pid namespace: in another namespace, such as a container's, the same pid is another process."""
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def _lives(pid: int, began: str) -> bool:
    """Whether the process `pid` that began at `began` still runs; another user's process counts although we may not
    signal it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _began(pid) in (began, "")  # unknown: it may be the same process


def _began(pid: int) -> str:
    """A process's start in ticks since boot, which tells apart processes that reused a pid; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{boot}.{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        return ""


def _translated(request: WorkerRequest, cache: Path) -> tuple[Work, list[Mount]]:
    """The work with its paths inside the container, and the mounts that put its files there.

    A mount of type bind refuses a source that does not exist (`volumes=` would create it, as root) and accepts sources
    with colons and spaces. Each file of a model folder is mounted by itself, as hub folders hold links to elsewhere.
    """
    work = request.work
    assert isinstance(work, EngineWork)
    mounts = [Mount(_WORK, str(request.exchange.folder), type="bind"), Mount(_CACHE, str(cache), type="bind")]
    spec, model = work.spec, work.model
    if model and model.path:
        folder = Path(model.path)
        mounts += [_read_only(f"{_MODEL}/{folder.name}/{f.name}", f) for f in sorted(folder.iterdir()) if f.exists()]
        model = replace(model, path=f"{_MODEL}/{folder.name}")
    if trace := spec.workload.trace:
        mounts.append(_read_only(f"{_INPUTS}/trace", Path(trace)))
        spec = replace(spec, workload=replace(spec.workload, trace=f"{_INPUTS}/trace"))
    if isinstance(work, MeasureIdle):
        return replace(work, spec=spec, model=model, cache=Path(_CACHE)), mounts
    assert model is not None
    questions = work.questions
    if questions is not None:
        mounts.append(_read_only(f"{_INPUTS}/questions", questions))
        questions = Path(f"{_INPUTS}/questions")
    return replace(work, spec=spec, model=model, cache=Path(_CACHE), questions=questions), mounts


def _unreadable(work: Work, user: int, group: int) -> str:
    """The name of the model's first file that this user may not read; empty if the user may read all."""
    assert isinstance(work, EngineWork)
    if not (work.model and work.model.path):
        return ""
    for file in sorted(Path(work.model.path).iterdir()):
        if not file.exists():  # a broken link
            continue
        status = file.stat()
        by_user, by_group = status.st_uid == user, status.st_gid == group
        needed = stat.S_IRUSR if by_user else stat.S_IRGRP if by_group else stat.S_IROTH
        if not status.st_mode & needed:
            return file.name
    return ""


def _read_only(inside: str, source: Path) -> Mount:
    return Mount(inside, str(source.resolve()), type="bind", read_only=True)


def _log(container: Any, log: Path) -> None:
    """Streams the container's output to the log. If the engine dies, the stream just ends, and `_wait` reports it."""
    with contextlib.suppress(DockerException, requests.RequestException, OSError), log.open("ab", 0) as sink:
        for piece in container.logs(stream=True, follow=True):
            sink.write(piece)


def _wait(container: Any, watched: _Watched) -> None:
    """Waits for the container's end, without a timeout: if the engine dies, the connection ends."""
    try:
        watched.exit_code = int(container.wait()["StatusCode"])
    except (DockerException, requests.RequestException) as exc:
        watched.lost = f"the container engine was lost while the cell ran: {reason(exc)}"
    finally:
        watched.over.set()


def _exit_code(status: int | None) -> int:
    """The exit code as for a process: the container's init reports 128 plus the number of a signal that killed it."""
    if status is None:
        return -signal.SIGKILL
    return 128 - status if 128 < status < 128 + signal.NSIG else status


def _kill(container: Any, pid: int) -> None:
    """Kills a container through the engine, or its processes if the engine does not answer."""
    with contextlib.suppress(DockerException, requests.RequestException):
        container.kill()
        return
    with contextlib.suppress(OSError, psutil.Error):
        if pid > 1 and _in_container(pid):
            for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
                process.kill()


def _in_container(pid: int) -> bool:
    """Whether a process runs in another pid namespace: this host may have reused the pid of a container's process."""
    return Path(f"/proc/{pid}/ns/pid").readlink() != Path("/proc/self/ns/pid").readlink()


def _killed_for_memory(container: Any) -> bool:
    """Whether the engine reports an OOM kill; Podman never does."""
    with contextlib.suppress(DockerException, requests.RequestException):
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
        except (DockerException, requests.RequestException):
            return


def _refused(status: Status, reason: str) -> Outcome:
    return Outcome(None, 1, cap_method="container", counts_page_cache=True, refusal=Refusal(status, reason))
