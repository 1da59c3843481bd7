"""How far the clocks of two ranks are apart: the same on one host, else measured by messages there and back."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Offset:
    """How many `seconds` another rank's `time.perf_counter` is ahead of the leader's, give or take `error_s`."""

    seconds: float = 0.0
    error_s: float = 0.0


def offset(exchanges: Iterable[tuple[float, float, float]]) -> Offset:
    """The offset from exchanges (sent, answered at on the other's clock, received). The fastest one tells most: the
    answer was given at some time between its sending and its receipt.

    Source: Cristian 1989, Probabilistic clock synchronization.
    """
    sent, answered, received = min(exchanges, key=lambda exchange: exchange[2] - exchange[0])
    return Offset(answered - (sent + received) / 2, (received - sent) / 2)


def clock_name() -> str:
    """Names the clock behind `time.perf_counter`: processes with equal names share it. Empty where nothing tells."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/time")  # a container may have shifted clocks, Linux 5.6 and later
        return f"{boot} {namespace.readlink()}" if namespace.is_symlink() else boot
    return ""
