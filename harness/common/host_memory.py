"""How much memory this process may take: of the machine, and within the limits of the cgroups that it is in."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
#: cgroup v1 says "no limit" by a number near 2^63, v2 by the word max.
_NO_LIMIT = 1 << 60


def free_memory() -> int:
    """Bytes that a process may take before others are squeezed."""
    free = psutil.virtual_memory().available
    limit = own_limit()
    return free if limit is None else min(free, limit)


def own_limit() -> int | None:
    """Bytes of the tightest memory limit on this process's own cgroups and those above them; None for no limit."""
    limits = []
    for version, own in memory_cgroups():
        name = "memory.limit_in_bytes" if version == 1 else "memory.max"
        for group in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((group / name).read_text()))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def memory_cgroups(process: int | str = "self") -> list[tuple[int, Path]]:
    """The version (1 or 2) and folder of each cgroup that may account for the memory of a process, by its number."""
    found = []
    with contextlib.suppress(OSError):
        for line in (PROC / str(process) / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = path.strip("/")
            if "memory" in controllers.split(","):
                found.append((1, CGROUP_ROOT / "memory" / own))
            elif not controllers:
                found.append((2, CGROUP_ROOT / own))
    return found
