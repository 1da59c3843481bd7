"""CPU time of this process and of the rest of the machine, to show whether other work disturbed a measurement."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from harness.api import Measurement, Phase

_NAMES = ("cpu_own_s", "cpu_other_s", "cpu_steal_s")


class CpuProbe:
    """CPU seconds of this process with its ended children, of all other processes, and stolen by the hypervisor.

    Source: /proc/stat and times(2). In a container /proc/stat covers the whole host, and so all disturbing work.
    """

    def __enter__(self) -> CpuProbe:
        self._before = _read()
        return self

    def __exit__(self, *exc: object) -> None:
        self._after = _read()

    def measurements(self, phase: Phase) -> list[Measurement]:
        """One sample per figure; no samples if /proc/stat cannot be read."""
        if self._before is None or self._after is None:
            return [Measurement(name, "s", (), phase, "no /proc/stat") for name in _NAMES]
        process, busy, steal = (b - a for a, b in zip(self._before, self._after, strict=True))
        # The two clocks tick differently: the difference can be slightly negative when no other process ran.
        values = (process, max(0.0, busy - process), steal)
        return [Measurement(name, "s", (round(v, 2),), phase) for name, v in zip(_NAMES, values, strict=True)]


def _read() -> tuple[float, float, float] | None:
    """(this process, all busy, stolen) CPU seconds since a fixed time."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(f) / tick for f in fields[:8])
        times = os.times()
        process = times.user + times.system + times.children_user + times.children_system
        return process, user + nice + system + irq + softirq, steal
    return None
