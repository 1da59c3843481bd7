"""How much memory this process may use: what the machine has free, within the limits of its cgroups."""

import contextlib
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
#: cgroup v1 writes "no limit" as a number near 2^63, v2 as the word max.
_NO_LIMIT = 1 << 60


def free_memory() -> int:
    """Bytes that this process may allocate without taking memory from others."""
    free = psutil.virtual_memory().available
    limit = own_limit()
    return free if limit is None else min(free, limit)


def own_limit() -> int | None:
    """Bytes of the tightest memory limit on this process's cgroups and their ancestors; None for no limit."""
    limits = []
    for version, cgroup in memory_cgroups():
        name = "memory.limit_in_bytes" if version == 1 else "memory.max"
        for group in (cgroup, *cgroup.parents):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((group / name).read_text()))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


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
