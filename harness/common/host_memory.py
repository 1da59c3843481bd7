"""How much memory this process may use: what the machine has free, within the limits of its cgroups."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
#: cgroup v1 writes "no limit" as a number near 2^63, v2 as the word max.
_NO_LIMIT = 1 << 60


#: What psutil raises where there is no /proc, or no MemTotal in it.
UNKNOWN = (OSError, LookupError, ValueError, RuntimeError)


def total_memory() -> int:
    """Bytes of this machine's RAM."""
    try:
        return int(psutil.virtual_memory().total)
    except UNKNOWN:
        return _pages("SC_PHYS_PAGES")


def free_memory() -> int:
    """Bytes that this process may allocate without taking memory from others."""
    try:
        free = int(psutil.virtual_memory().available)
    except UNKNOWN:
        free = _pages("SC_AVPHYS_PAGES")
    return min([free, *(max(0, limit - _used(group, version)) for version, group, limit in _limits())])


def _pages(name: str) -> int:
    """Bytes of what the C library counts in pages."""
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def own_limit() -> int | None:
    """Bytes of the tightest memory limit on this process's cgroups and their ancestors; None for no limit."""
    return min((limit for *_, limit in _limits()), default=None)


def _limits() -> Iterator[tuple[int, Path, int]]:
    """The version, folder and limit of each cgroup of this process, and of their ancestors, that has a limit."""
    for version, cgroup in memory_cgroups():
        name = "memory.limit_in_bytes" if version == 1 else "memory.max"
        for group in (cgroup, *cgroup.parents):
            with contextlib.suppress(OSError, ValueError):
                limit = int((group / name).read_text())
                if limit < _NO_LIMIT:
                    yield version, group, limit


def _used(group: Path, version: int) -> int:
    """Bytes that a cgroup's processes hold, without file pages that the kernel would take back first."""
    name, inactive = (
        ("memory.usage_in_bytes", "total_inactive_file") if version == 1 else ("memory.current", "inactive_file")
    )
    with contextlib.suppress(OSError, ValueError):
        used = int((group / name).read_text())
        lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        return used - next((int(count) for key, count in lines if key == inactive), 0)
    return 0


def memory_cgroups(process: int | str = "self") -> list[tuple[int, Path]]:
    """The version (1 or 2) and folder of each cgroup that may account for the memory of `process` (a pid or "self")."""
    cgroups = []
    with contextlib.suppress(OSError):
        for line in (PROC / str(process) / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            relative = path.strip("/")
            if "memory" in controllers.split(","):
                cgroups.append((1, CGROUP_ROOT / "memory" / relative))
            elif not controllers:
                cgroups.append((2, CGROUP_ROOT / relative))
    return cgroups
