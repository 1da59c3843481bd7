"""The `docker` launcher's sandbox: a worker in a container of its engine's image, through Docker's own API."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import psutil
import requests
from docker.errors import APIError, DockerException, NotFound
from docker.types import DeviceRequest, LogConfig, Mount, Ulimit

from harness import registry
from harness.api import EventSink, RunSpec, Status, UnsupportedError
from harness.launchers import images
from harness.launchers.images import engine_errors, reason
from harness.launchers.memory import GroupReader
from harness.launchers.protocol import REQUEST, WORKER
from harness.launchers.sandbox import Outcome, Task, exchange, log_tail, result_of, settings, watch

#: Who started a container: host, where its processes are numbered, process, and when that process began.
OWNER = "offload-harness.owner"
_OWNER = re.compile(r"(?P<host>.*)/(?P<space>.*)/(?P<pid>\d+)@(?P<began>.*)")
#: Where things are in a container.
_WORK, _CACHE, _MODEL, _INPUTS = "/harness/work", "/harness/cache", "/harness/model", "/harness/inputs"
#: Of the worker, where the harness itself runs as root.
_UNPRIVILEGED = 1000
_MAX_PROCESSES = 4096
_GONE_TIMEOUT_S = 20.0


class Containers:
    """Sandboxes of one Docker engine, which answers. Raises HarnessError where none does.

    Containers of harnesses that are gone are removed first: they were killed and could not clean up.
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

    def of(self, spec: RunSpec, log: Path, on_event: EventSink) -> ContainerSandbox:
        name = spec.image or images.name_of(registry.engine_entry(spec.engine).environment)
        if spec.limits.device_memory is not None and not self._engine.gives_gpus:
            raise UnsupportedError("Podman's API passes no GPU to a container: use Docker, or --launcher process")
        if spec.limits.host_memory is not None and not self._engine.limits_memory:
            raise UnsupportedError("this container engine cannot limit memory (no such cgroup): use --launcher process")
        with engine_errors(f"no image {name} ({images.remedy(spec)})"):
            image = self._client.images.get(name)  # first, for a run would try to download what is missing
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
    """What the threads beside a container found: its exit code, and what went wrong with the engine."""

    exit_code: int | None = None
    lost: str = ""
    over: threading.Event = field(default_factory=threading.Event)


class ContainerSandbox:
    """Runs the worker that is in an image: no network, no privilege, not as root, the model read-only."""

    def __init__(self, client: docker.DockerClient, engine: _Engine, name: str, image: str, cache: Path) -> None:
        self._client = client
        self._engine = engine
        self._name = name
        self._image = image
        self._cache = cache
        self._locks_memory = True

    def identity(self) -> Mapping[str, str]:
        return {"image": self._name, "image_digest": self._image, "container_engine": self._engine.name}

    def run(self, task: Task, on_event: EventSink) -> Outcome:
        user = os.getuid() or _UNPRIVILEGED
        group = os.getgid() if os.getuid() else _UNPRIVILEGED
        # a rootless engine's root is the user who runs it, and its other users own nothing on this host
        inside = "0:0" if self._engine.rootless else f"{user}:{group}"
        if not self._engine.rootless and (unreadable := _unreadable(task, user, group)):
            why = f"{unreadable} is not readable by the container's user {user}: chmod a+r it"
            return _refused("error", why)
        body, mounts = _translated(task, self._cache)

        def attempt(log_start: int) -> Outcome:
            try:
                container = self._create(task, mounts, inside)
            except (DockerException, requests.RequestException) as exc:
                return _refused("error", f"the container engine refuses: {reason(exc)}")
            try:
                return self._run(container, task, log_start, on_event)
            finally:
                _remove(container)

        # the worker's parent is the container's init
        with exchange(task, 1, body) as log_start:
            self._cache.mkdir(parents=True, exist_ok=True)
            if os.getuid() == 0:
                # only what is ours: what a container has left in the cache may be a link to anything
                for path in (self._cache, task.workdir, task.workdir / REQUEST):
                    os.chown(path, user, group, follow_symlinks=False)
            outcome = attempt(log_start)
            if self._locks_memory and outcome.refused and "rlimit" in outcome.refused[1]:
                self._locks_memory = False  # an engine without root's rights cannot raise the limit: as it is, then
                outcome = attempt(log_start)
            return outcome

    def _create(self, task: Task, mounts: list[Mount], user: str) -> Any:
        limit = {} if task.limit_bytes is None else {"mem_limit": task.limit_bytes, "memswap_limit": task.limit_bytes}
        cores: dict[str, Any] = {}
        if task.threads is not None:
            cores["nano_cpus"] = min(task.threads, os.cpu_count() or 1) * 10**9
        if len(mine := os.sched_getaffinity(0)) < (os.cpu_count() or 1):  # a process would inherit it
            cores["cpuset_cpus"] = ",".join(map(str, sorted(mine)))
        # pinned buffers are locked memory; the cgroup bounds that too
        locked = [Ulimit(name="memlock", soft=-1, hard=-1)] if self._locks_memory else []
        gpus = {"device_requests": [_devices()]} if task.gpu else {}
        return self._client.containers.create(
            self._image,
            entrypoint=["python", "-P", "-m", WORKER],
            command=[_WORK],
            environment=settings(task.threads, task.gpu) | {"HOME": "/tmp"},
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

    def _run(self, container: Any, task: Task, log_start: int, on_event: EventSink) -> Outcome:
        try:
            container.start()
            container.reload()
        except (DockerException, requests.RequestException) as exc:
            if "could not select device driver" in (why := reason(exc)):
                return _refused("unsupported", "this container engine has no GPU to give: install the vendor's runtime")
            return _refused("error", f"the container did not start: {why}")
        pid = int(container.attrs["State"]["Pid"])
        group = GroupReader(pid, container.id)
        watched = _Watched()
        streams = [
            threading.Thread(target=target, args=(container, task, watched), daemon=True) for target in (_log, _wait)
        ]
        for stream in streams:
            stream.start()

        def ended() -> bool:
            group.read()
            return watched.over.is_set()

        timed_out = watch(task, ended, on_event)
        if timed_out:
            _kill(container, pid)
        for stream in streams:
            stream.join(_GONE_TIMEOUT_S)
        killed = _killed_for_memory(container)
        if watched.lost and not killed:
            _kill(container, pid)
        found = None if timed_out or watched.lost else result_of(task)
        return Outcome(
            found,
            _exit_code(watched.exit_code),
            timed_out,
            max(group.oom_kills, int(killed)),
            group.peak_bytes,
            f"container, {group.version}" if group.version else "container",
            True,
            log_tail(task.log, log_start),
            ("error", watched.lost) if watched.lost and not timed_out else None,
        )


def _devices() -> DeviceRequest:
    """The devices that a process of ours would see."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return DeviceRequest(device_ids=visible.split(","), capabilities=[["gpu"]])
    return DeviceRequest(count=-1, capabilities=[["gpu"]])


def remove_abandoned(client: docker.DockerClient) -> list[str]:
    """Removes containers of this host's harnesses that live no longer; their names."""
    removed = []
    for container in client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
        owner = _OWNER.fullmatch(container.labels[OWNER])
        here = (platform.node(), _space())
        if owner and (owner["host"], owner["space"]) == here and not _lives(int(owner["pid"]), owner["began"]):
            with contextlib.suppress(DockerException):
                container.remove(force=True)
                removed.append(container.name)
    return removed


def _owner() -> str:
    return f"{platform.node()}/{_space()}/{os.getpid()}@{_began(os.getpid())}"


def _space() -> str:
    """Which process namespace this is: in another one, such as a container's, our numbers mean nothing."""
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def _lives(pid: int, began: str) -> bool:
    """Whether that process is still there; one that may not be signalled is another user's, and may be."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _began(pid) in (began, "")  # nobody may look at it: then it may be


def _began(pid: int) -> str:
    """When a process began, in ticks of this boot: its number alone may be another's by now, and clocks are set."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        return f"{boot}.{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        return ""


def _translated(task: Task, cache: Path) -> tuple[dict[str, Any], list[Mount]]:
    """The request with a container's paths, and what has to be mounted there.

    A mount of type bind refuses a source that does not exist (`volumes=` would make it, as root), and takes sources
    with colons and spaces. Of a model folder each file is mounted by itself, for a hub's are links to elsewhere.
    """
    body = task.body | {"cache": _CACHE}
    mounts = [Mount(_WORK, str(task.workdir), type="bind"), Mount(_CACHE, str(cache), type="bind")]
    model = body.get("model")
    if model and model["path"]:
        folder = Path(model["path"])
        body["model"] = model | {"path": f"{_MODEL}/{folder.name}"}
        mounts += [_read_only(f"{_MODEL}/{folder.name}/{f.name}", f) for f in sorted(folder.iterdir()) if f.exists()]
    if "questions" in body:
        mounts.append(_read_only(f"{_INPUTS}/questions", Path(body["questions"])))
        body["questions"] = f"{_INPUTS}/questions"
    if trace := body["spec"]["workload"]["trace"]:
        mounts.append(_read_only(f"{_INPUTS}/trace", Path(trace)))
        workload = body["spec"]["workload"] | {"trace": f"{_INPUTS}/trace"}
        body["spec"] = body["spec"] | {"workload": workload}
    return body, mounts


def _unreadable(task: Task, user: int, group: int) -> str:
    """The name of a model's file that a container's user may not read, if there is one."""
    folder = (task.body.get("model") or {}).get("path")
    for file in sorted(Path(folder).iterdir()) if folder else ():
        if not file.exists():  # a link to nowhere
            continue
        status = file.stat()
        own, ours = status.st_uid == user, status.st_gid == group
        needed = stat.S_IRUSR if own else stat.S_IRGRP if ours else stat.S_IROTH
        if not status.st_mode & needed:
            return file.name
    return ""


def _read_only(inside: str, source: Path) -> Mount:
    return Mount(inside, str(source.resolve()), type="bind", read_only=True)


def _log(container: Any, task: Task, watched: _Watched) -> None:
    """Streams the container's output into the log. The stream ends silently when the engine dies: `_wait` notices."""
    with contextlib.suppress(DockerException, requests.RequestException, OSError), task.log.open("ab", 0) as sink:
        for piece in container.logs(stream=True, follow=True):
            sink.write(piece)


def _wait(container: Any, task: Task, watched: _Watched) -> None:
    """Waits for the container's end. Without a timeout: the engine's death ends the connection."""
    try:
        watched.exit_code = int(container.wait()["StatusCode"])
    except (DockerException, requests.RequestException) as exc:
        watched.lost = f"the container engine was lost while the cell ran: {reason(exc)}"
    finally:
        watched.over.set()


def _exit_code(status: int | None) -> int:
    """As of a process: the container's init says 128 and the number where a signal ended the worker."""
    if status is None:
        return -signal.SIGKILL
    return 128 - status if 128 < status < 128 + signal.NSIG else status


def _kill(container: Any, pid: int) -> None:
    """Really ends it: through the engine, and where that does not answer by the kernel."""
    with contextlib.suppress(DockerException, requests.RequestException):
        container.kill()
        return
    with contextlib.suppress(OSError, psutil.Error):
        if pid > 1 and _in_container(pid):
            for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
                process.kill()


def _in_container(pid: int) -> bool:
    """Whether a process is still one of a container's: its number may be another's by now."""
    return Path(f"/proc/{pid}/ns/pid").readlink() != Path("/proc/self/ns/pid").readlink()


def _killed_for_memory(container: Any) -> bool:
    """What the engine says; Podman never says yes."""
    with contextlib.suppress(DockerException, requests.RequestException):
        container.reload()
        return bool(container.attrs["State"].get("OOMKilled"))
    return False


def _remove(container: Any) -> None:
    """Whatever became of it; an engine that is gone leaves it to the next run's clean-up."""
    deadline = time.monotonic() + _GONE_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            container.remove(force=True)
            return
        except NotFound:
            return
        except APIError:  # its removal is under way, or a file of it is busy
            time.sleep(0.2)
        except (DockerException, requests.RequestException):
            return


def _refused(status: Status, reason: str) -> Outcome:
    return Outcome(None, 1, False, 0, None, "container", True, "", (status, reason))
