"""CPU time of this process and of everything else on the machine: a disturbed measurement shows itself."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from harness.api import Measurement, Phase

_NAMES = ("cpu_own_s", "cpu_other_s", "cpu_steal_s")


class CpuProbe:
    """Seconds of CPU used by this process and its ended children, by others, and stolen by the hypervisor.

    Source: /proc/stat and times(2). In a container /proc/stat is the host's, which is what disturbs.
    """

    def __enter__(self) -> CpuProbe:
        self._before = _read()
        return self

    def __exit__(self, *exc: object) -> None:
        self._after = _read()

    def measurements(self, phase: Phase) -> list[Measurement]:
        """One sample each; empty where the kernel does not tell."""
        if self._before is None or self._after is None:
            return [Measurement(name, "s", (), phase, "no /proc/stat") for name in _NAMES]
        own, busy, steal = (b - a for a, b in zip(self._before, self._after, strict=True))
        # The two clocks tick differently: a small negative rest means that nobody else ran.
        values = (own, max(0.0, busy - own), steal)
        return [Measurement(name, "s", (round(v, 2),), phase) for name, v in zip(_NAMES, values, strict=True)]


def _read() -> tuple[float, float, float] | None:
    """(own, all busy, stolen) CPU seconds since some fixed past."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(f) / tick for f in fields[:8])
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return own, user + nice + system + irq + softirq, steal
    return None
