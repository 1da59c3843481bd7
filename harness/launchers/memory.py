"""Caps a process tree's memory: by cgroup v1 or v2 if this host allows one, else by a sampling monitor.

Order of use of a group: make it, `wrap` the command, start that, `adopt` the process, wait, read, `close`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from harness.common.host_memory import memory_cgroups
from harness.common.rank_groups import in_group, told
from harness.probes.memory import held_bytes

_PREFIX = "harness-"


class Cgroup:
    """A memory cgroup of this version. Its limit counts anonymous memory, page cache and shared memory.

    `env`: what the process in it must be told. Its counters keep their values once the group is gone.
    """

    counts_page_cache = True
    env: Mapping[str, str] = {}

    def __init__(self, version: int, path: Path) -> None:
        self.path = path
        self.method = f"cgroup-v{version}"
        # memory.peak: Linux 5.19 and later
        events, peak = {1: ("oom_control", "max_usage_in_bytes"), 2: ("events", "peak")}[version]
        self._events_file, self._peak_file = path / f"memory.{events}", path / f"memory.{peak}"
        self._kills = 0
        self._peak: int | None = None

    @classmethod
    def make(cls, version: int, parent: Path, limit: int | None) -> Cgroup:
        """A new group below `parent`, without swap beyond its limit. Raises OSError where none can be made."""
        name = {1: "memory.limit_in_bytes", 2: "memory.max"}[version]
        more = {"memory.memsw.limit_in_bytes": limit, "memory.swap.max": 0, "memory.oom.group": 1}
        group = cls(version, parent / f"{_PREFIX}{os.getpid()}-{time.monotonic_ns()}")
        group.path.mkdir()
        try:
            if not (group.path / name).exists():
                raise OSError(f"the memory controller is not delegated to {parent}")
            if limit is not None:
                (group.path / name).write_text(str(limit))
                for name, value in more.items():  # of either version; those of swap where the kernel accounts it
                    if (group.path / name).exists():
                        with contextlib.suppress(OSError):
                            (group.path / name).write_text(str(value))
        except OSError:
            group.close()
            raise
        return group

    def wrap(self, command: list[str]) -> list[str]:
        """The command line that starts `command` inside the group."""
        return in_group(self.path / "cgroup.procs", command)

    def adopt(self, pid: int) -> None:
        """Does nothing: the process entered the group before it became the command."""

    def read(self) -> None:
        """Updates the counters while the group exists."""
        with contextlib.suppress(OSError, ValueError):
            events = dict(line.split() for line in self._events_file.read_text().splitlines())
            self._kills = max(self._kills, int(events.get("oom_kill", 0)))
        with contextlib.suppress(OSError, ValueError):
            self._peak = max(self._peak or 0, int(self._peak_file.read_text()))

    def oom_kills(self) -> int:
        """How often the limit killed a process of the group: the evidence for `oom_host`."""
        self.read()
        return self._kills

    def peak_bytes(self) -> int | None:
        """The most that the group held at once, in the units its limit counts."""
        self.read()
        return self._peak

    def kill(self) -> None:
        """Ends every process of the group."""
        with contextlib.suppress(OSError):  # version 2, Linux 5.14 and later
            (self.path / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                # a process of another pid namespace reads as 0, and kill(0) would signal our own group
                pids = [int(p) for p in (self.path / "cgroup.procs").read_text().split() if p != "0"]
            except OSError:
                return
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def close(self) -> None:
        """Removes the group."""
        for _ in range(200):  # the kernel may need a moment after the last process is gone
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                self.kill()
                time.sleep(0.01)


class RankGroups:
    """Groups with a limit each, for a process and the ranks that it starts, with the methods of one; its counters are
    sums."""

    counts_page_cache = True

    def __init__(self, groups: Sequence[Cgroup]) -> None:
        self._groups = groups
        self.method = groups[0].method
        self.env = told([group.path / "cgroup.procs" for group in groups])

    def wrap(self, command: list[str]) -> list[str]:
        return self._groups[0].wrap(command)

    def adopt(self, pid: int) -> None:
        """Does nothing, as that of Cgroup."""

    def oom_kills(self) -> int:
        return sum(group.oom_kills() for group in self._groups)

    def peak_bytes(self) -> int | None:
        """The sum of the groups' own peaks, which need not have been at the same time."""
        peaks = [peak for group in self._groups if (peak := group.peak_bytes()) is not None]
        return sum(peaks) if peaks else None

    def kill(self) -> None:
        for group in self._groups:
            group.kill()

    def close(self) -> None:
        for group in self._groups:
            group.close()


class Monitor:
    """The fallback without cgroups, with the same methods: samples the tree's anonymous and shared memory and kills the
    tree above the limit. Memory that is pinned for a device counts as shared.

    The monitor does not see the page cache, and memory can grow past the limit between samples; so that readers know,
    records name the method `monitor`.
    """

    method = "monitor"
    counts_page_cache = False
    env: Mapping[str, str] = {}
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
            held = sum(held_bytes(process.pid) for process in self._tree())
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


def container_group(pid: int, container: str) -> Cgroup | None:
    """The memory cgroup of a container's process, if this host shows it.

    A group counts only if its path holds the container's id: a container engine on another host gives process ids that
    belong to other processes here.
    """
    groups = [Cgroup(version, path) for version, path in memory_cgroups(pid) if container in str(path)]
    return next((group for group in groups if (group.path / "memory.stat").exists()), None)


def make_group(limit: int | None, ranks: int = 1) -> Cgroup | RankGroups | Monitor:
    """The strictest group that this host allows; `limit` in bytes, of all `ranks` together: where groups can be made,
    each has one with its part."""
    each = None if limit is None else limit // ranks
    for version, parent in _parents():
        with contextlib.ExitStack() as made, contextlib.suppress(OSError):
            groups = [made.enter_context(contextlib.closing(Cgroup.make(version, parent, each))) for _ in range(ranks)]
            made.pop_all()
            return groups[0] if ranks == 1 else RankGroups(groups)
    return Monitor(limit)


def cap_method() -> str:
    """The method by which this host would bound a launch's memory."""
    group = make_group(None)
    group.close()
    return group.method


def sweep_stale_groups() -> None:
    """Removes groups left by killed harnesses, and kills the processes in them."""
    for version, parent in _parents():
        for path in parent.glob(f"{_PREFIX}*-*"):
            owner = path.name.removeprefix(_PREFIX).split("-")[0]
            if owner.isdigit() and not psutil.pid_exists(int(owner)):
                with contextlib.suppress(OSError):
                    Cgroup(version, path).close()


def _parents() -> Iterator[tuple[int, Path]]:
    """Version and path of possible parents of a new group, best first: within this process's own, outer limits hold."""
    for version, group in memory_cgroups():
        if version == 1:
            yield version, group
        else:  # a v2 group that has processes cannot delegate memory to children: try its parents too
            yield from ((2, base) for base in (group, *group.parents) if (base / "cgroup.controllers").exists())
