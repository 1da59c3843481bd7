"""Caps a process tree's memory: by cgroup v1 or v2 if this host allows one, else by a sampling monitor."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Protocol

import psutil

from harness.common.host_memory import memory_cgroups

_PREFIX = "harness-"


class MemoryGroup(Protocol):
    """A group of processes with bounded memory. Order of use: make, `wrap` the command, start it, `adopt`, wait, read,
    `close`."""

    method: str
    counts_page_cache: bool

    def wrap(self, command: list[str]) -> list[str]:
        """The command line that starts `command` inside the group."""
        ...

    def adopt(self, pid: int) -> None:
        """Tells the group which process was started."""
        ...

    def oom_kills(self) -> int:
        """How often the limit killed a process of the group: the evidence for `oom_host`."""
        ...

    def anonymous_bytes(self) -> int:
        """Anonymous memory the group holds now."""
        ...

    def peak_bytes(self) -> int | None:
        """The most the group held at once, in the units its limit counts."""
        ...

    def kill(self) -> None:
        """Ends every process of the group."""
        ...

    def close(self) -> None:
        """Removes the group."""
        ...


class _Cgroup:
    """Common to both versions: a child group that a process enters before it execs the command."""

    counts_page_cache = True
    path: Path

    def wrap(self, command: list[str]) -> list[str]:
        return _enter_and_exec(self.path, command)

    def adopt(self, pid: int) -> None:
        """Does nothing: the process entered the group before it became the command."""

    def kill(self) -> None:
        _kill_group(self.path)

    def close(self) -> None:
        _remove_group(self.path)


class CgroupV1(_Cgroup):
    """A child of this process's memory cgroup. The limit counts anonymous memory, page cache and shared memory."""

    method = "cgroup-v1"

    def __init__(self, parent: Path, limit: int | None) -> None:
        self.path = _make_group(parent)
        try:
            if limit is not None:
                (self.path / "memory.limit_in_bytes").write_text(str(limit))
                with contextlib.suppress(OSError):  # absent where the kernel does not account swap
                    (self.path / "memory.memsw.limit_in_bytes").write_text(str(limit))
        except OSError:
            self.close()
            raise

    def oom_kills(self) -> int:
        return _keyed(self.path / "memory.oom_control").get("oom_kill", 0)

    def anonymous_bytes(self) -> int:
        return _keyed(self.path / "memory.stat").get("total_rss", 0)

    def peak_bytes(self) -> int | None:
        return _number(self.path / "memory.max_usage_in_bytes")


class CgroupV2(_Cgroup):
    """A cgroup v2 group with `memory.max`, no swap, and out-of-memory ending the whole group."""

    method = "cgroup-v2"

    def __init__(self, parent: Path, limit: int | None) -> None:
        self.path = _make_group(parent)
        try:
            if not (self.path / "memory.max").exists():
                raise OSError(f"the memory controller is not delegated to {parent}")
            if limit is not None:
                (self.path / "memory.max").write_text(str(limit))
                for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
                    if (self.path / name).exists():
                        (self.path / name).write_text(value)
        except OSError:
            self.close()
            raise

    def oom_kills(self) -> int:
        return _keyed(self.path / "memory.events").get("oom_kill", 0)

    def anonymous_bytes(self) -> int:
        return _keyed(self.path / "memory.stat").get("anon", 0)

    def peak_bytes(self) -> int | None:
        return _number(self.path / "memory.peak")  # Linux 5.19 and later

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")
        super().kill()


class Monitor:
    """The fallback without cgroups: samples the tree's anonymous and shared memory and kills the tree above the limit.
    Memory that is pinned for a device counts as shared.

    The monitor does not see the page cache, and memory can grow past the limit between samples; so that readers know,
    records name the method `monitor`.
    """

    method = "monitor"
    counts_page_cache = False
    _PERIOD_S = 0.02

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._process: psutil.Process | None = None
        self._seen: set[psutil.Process] = set()  # a child whose parent died is no longer in the tree
        self._peak = 0
        self._kills = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-monitor", daemon=True)

    def wrap(self, command: list[str]) -> list[str]:
        return command

    def adopt(self, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(pid)
            self._thread.start()

    def _watch(self) -> None:
        while not self._stop.is_set():
            held = self.anonymous_bytes()
            self._peak = max(self._peak, held)
            if self._limit is not None and held > self._limit and not self._kills:
                self._kills = 1
                self.kill()
            self._stop.wait(self._PERIOD_S)

    def _tree(self) -> list[psutil.Process]:
        if self._process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen |= {self._process, *self._process.children(recursive=True)}
        return [p for p in self._seen if p.is_running()]

    def oom_kills(self) -> int:
        return self._kills

    def anonymous_bytes(self) -> int:
        return sum(_anonymous_of(p.pid) for p in self._tree())

    def peak_bytes(self) -> int | None:
        return self._peak

    def kill(self) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()


class GroupReader:
    """The kernel's counters of a container's memory group, if this host shows them. Call `read` while the group exists.

    A group counts only if its path holds the container's id: a container engine on another host gives process ids that
    belong to other processes here.
    """

    def __init__(self, pid: int, container: str) -> None:
        self.oom_kills = 0
        self.peak_bytes: int | None = None
        self.version = ""
        for version, group in memory_cgroups(pid):
            if container in str(group) and (group / "memory.stat").exists():
                self._group, self.version = group, f"cgroup-v{version}"

    def read(self) -> None:
        """Updates the counters; they keep their values once the group is gone."""
        if not self.version:
            return
        v1 = self.version == "cgroup-v1"
        kills = _keyed(self._group / ("memory.oom_control" if v1 else "memory.events")).get("oom_kill", 0)
        peak = _number(self._group / ("memory.max_usage_in_bytes" if v1 else "memory.peak"))
        self.oom_kills = max(self.oom_kills, kills)
        self.peak_bytes = max(filter(None, (self.peak_bytes, peak)), default=None)


def make_group(limit: int | None) -> MemoryGroup:
    """The strictest group that this host allows; `limit` in bytes."""
    for kind, parent in _parents():
        with contextlib.suppress(OSError):
            return kind(parent, limit)
    return Monitor(limit)


def cap_method() -> str:
    """The method by which this host would bound a launch's memory."""
    group = make_group(None)
    group.close()
    return group.method


def sweep_stale_groups() -> None:
    """Removes groups left by killed harnesses, and kills the processes in them."""
    for _, parent in _parents():
        for path in parent.glob(f"{_PREFIX}*-*") if parent.is_dir() else ():
            owner = path.name.removeprefix(_PREFIX).split("-")[0]
            if owner.isdigit() and not psutil.pid_exists(int(owner)):
                _kill_group(path)
                with contextlib.suppress(OSError):
                    _remove_group(path)


def _parents() -> list[tuple[type[CgroupV1] | type[CgroupV2], Path]]:
    """Possible parents of a new group, best first: this process's own group, so outer limits still hold."""
    parents: list[tuple[type[CgroupV1] | type[CgroupV2], Path]] = []
    for version, group in memory_cgroups():
        if version == 1:
            parents.append((CgroupV1, group))
            continue
        # a v2 group that has processes cannot delegate memory to children: try its parents too
        parents += [(CgroupV2, base) for base in (group, *group.parents) if (base / "cgroup.controllers").exists()]
    return parents


def _make_group(parent: Path) -> Path:
    if not parent.is_dir():
        raise OSError(f"no cgroup at {parent}")
    path = parent / f"{_PREFIX}{os.getpid()}-{time.monotonic_ns()}"
    path.mkdir()
    return path


def _enter_and_exec(group: Path, command: list[str]) -> list[str]:
    # The shell enters the group before it becomes the command, so no byte is charged elsewhere.
    return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]


def _kill_group(path: Path) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            # a process of another pid namespace reads as 0, and kill(0) would signal our own group
            pids = [int(p) for p in (path / "cgroup.procs").read_text().split() if p != "0"]
        except OSError:
            return
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _remove_group(path: Path) -> None:
    """Removes an emptied group; the kernel may need a moment after the last process is gone."""
    for _ in range(200):
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            _kill_group(path)
            time.sleep(0.01)


def _keyed(path: Path) -> dict[str, int]:
    """A flat-keyed kernel file as a dict."""
    try:
        return {k: int(v) for k, _, v in (line.partition(" ") for line in path.read_text().splitlines())}
    except (OSError, ValueError):
        return {}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _anonymous_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
    return 0
