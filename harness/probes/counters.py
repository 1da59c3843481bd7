"""Probes that read a counter at both ends of a phase: CPU time, bytes of storage."""

import contextlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from harness.api import Measurement, Phase
from harness.probes.family import family


def counted(name: str, unit: str, spent: Mapping[str, float], phase: Phase, missing: str) -> Measurement:
    """What a counter grew by; without a sample, and with the reason `missing`, if it is not in `spent`."""
    if name in spent:
        return Measurement(name, unit, (spent[name],), phase)
    return Measurement(name, unit, (), phase, missing)


class _CounterProbe(ABC):
    """Reads its counters, by name, at both ends; what is not readable is missing from them."""

    def __enter__(self) -> Self:
        self._before = self._read()
        return self

    def __exit__(self, *exc: object) -> None:
        self._after = self._read()

    @abstractmethod
    def _read(self) -> dict[str, float]:
        """The counters that are readable, by name."""

    def _spent(self) -> Iterator[tuple[str, float]]:
        """What each counter grew by, for those that were readable at both ends."""
        for name, before in self._before.items():
            if name in self._after:
                yield name, self._after[name] - before


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of its ended children; 0 once it is gone."""
    with contextlib.suppress(OSError, ValueError):
        # after the name in parentheses, which may hold spaces: fields 14 to 17 of proc(5)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")
    return 0.0


#: Set in the flags of a thread of the kernel (include/linux/sched.h, PF_KTHREAD).
_KERNEL_THREAD = 0x00200000


def _kernel_seconds() -> float:
    """CPU seconds of the kernel's threads, as far as they are visible: none are from within a container."""
    seconds = 0.0
    for listed in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (listed / "stat").read_text().rpartition(")")[2].split()
            if int(fields[6]) & _KERNEL_THREAD:
                seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


class CpuProbe(_CounterProbe):
    """CPU seconds of this process with its children, of the kernel's threads, of all other processes, and stolen by the
    hypervisor: other work that disturbed a measurement shows.

    The kernel's threads (writing back pages, decrypting, reclaiming) work for this process and for others alike; an
    engine that maps its files can cause a fifth of the machine's work there, so they count apart from others.
    Source: /proc/stat and /proc/PID/stat. In a container /proc/stat covers the whole host, and so all disturbing work.
    """

    def measurements(self, phase: Phase) -> list[Measurement]:
        """One sample per figure; no samples if /proc/stat cannot be read."""
        spent = dict(self._spent())
        if spent:
            # Read one after the other: the difference can be slightly negative when no other process ran.
            # A kernel thread that ended took its seconds with it.
            spent["cpu_kernel_s"] = max(0.0, spent["cpu_kernel_s"])
            spent["cpu_other_s"] = max(0.0, spent["busy"] - spent["cpu_own_s"] - spent["cpu_kernel_s"])
        spent = {name: round(seconds, 2) for name, seconds in spent.items()}
        names = ("cpu_own_s", "cpu_kernel_s", "cpu_other_s", "cpu_steal_s")
        return [counted(name, "s", spent, phase, "no /proc/stat") for name in names]

    def _read(self) -> dict[str, float]:
        """CPU seconds since a fixed time: of this process, of the kernel's threads, of all, stolen."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
            tick = os.sysconf("SC_CLK_TCK")
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(f) / tick for f in fields[:8])
            return {
                "cpu_own_s": sum(map(_cpu_seconds, family())),
                "cpu_kernel_s": _kernel_seconds(),
                "busy": user + nice + system + irq + softirq,
                "cpu_steal_s": steal,
            }
        return {}


class DiskProbe(_CounterProbe):
    """Bytes read from and written to storage in one phase, page faults on mapped files included.

    Source: /proc/PID/io of this process and its children; it includes those that have ended and been waited for.
    """

    def measurements(self, phase: Phase) -> list[Measurement]:
        """`read_bytes` and `write_bytes`; no samples if the kernel does not account I/O."""
        spent = dict(self._spent())
        return [counted(name, "bytes", spent, phase, "no /proc/self/io") for name in ("read_bytes", "write_bytes")]

    def _read(self) -> dict[str, float]:
        counters: Counter[str] = Counter()
        for pid in family():
            with contextlib.suppress(OSError, ValueError):
                for line in Path(f"/proc/{pid}/io").read_text().splitlines():
                    name, _, value = line.partition(": ")
                    counters[name] += int(value)
        return dict(counters)
