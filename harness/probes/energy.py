"""Energy of the CPU packages from RAPL counters, where the host has them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from harness.api import Measurement, Phase

POWERCAP = Path("/sys/class/powercap")


class EnergyProbe:
    """Joules of all CPU packages over one phase (Linux powercap), correct if each counter wraps at most once."""

    def __enter__(self) -> EnergyProbe:
        self._before = _microjoules()
        return self

    def __exit__(self, *exc: object) -> None:
        self._after = _microjoules()

    def measurements(self, phase: Phase) -> list[Measurement]:
        """`energy_j`; no samples if no counter can be read."""
        zones = self._before.keys() & self._after.keys()
        if not zones:
            return [Measurement("energy_j", "J", (), phase, "no readable RAPL counter")]
        total = 0
        for zone in zones:
            spent = self._after[zone] - self._before[zone]
            total += spent if spent >= 0 else spent + int((zone / "max_energy_range_uj").read_text())
        return [Measurement("energy_j", "J", (total / 1e6,), phase, "CPU packages (RAPL)")]


def _microjoules() -> dict[Path, int]:
    counters = {}
    for zone in POWERCAP.glob("intel-rapl:*"):
        if zone.name.count(":") == 1:
            with contextlib.suppress(OSError, ValueError):
                counters[zone] = int((zone / "energy_uj").read_text())
    return counters
