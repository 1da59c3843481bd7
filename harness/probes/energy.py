"""Energy of the CPU packages over a phase, from Linux powercap (RAPL)."""

import contextlib
from pathlib import Path

from harness.api import Measurement, Phase
from harness.probes.memory import SamplingProbe

POWERCAP = Path("/sys/class/powercap")


class EnergyProbe(SamplingProbe):
    """Sums the increments of each package's counter every `period_s`.

    A counter of 65 kJ, the smallest in use, wraps in minutes at full power: between two samples it wraps at most once.
    """

    def __init__(self, period_s: float = 10.0) -> None:
        super().__init__(period_s)
        self._last: dict[str, int] = {}
        self._spent: dict[str, int] = {}

    def _sample(self) -> None:
        counters = _read()
        for zone in self._last.keys() & counters.keys():
            grown = counters[zone] - self._last[zone]
            if grown < 0:
                grown += int((POWERCAP / zone / "max_energy_range_uj").read_text())
            self._spent[zone] = self._spent.get(zone, 0) + grown
        self._last = counters

    def measurements(self, phase: Phase) -> list[Measurement]:
        """`energy_j`; no samples if no counter can be read."""
        if not self._spent:
            return [Measurement("energy_j", "J", (), phase, "no readable RAPL counter")]
        return [Measurement("energy_j", "J", (sum(self._spent.values()) / 1e6,), phase, "CPU packages (RAPL)")]


def _is_package(zone: Path) -> bool:
    """Whether a zone is not the platform's ("psys"), which has the package's joules too."""
    with contextlib.suppress(OSError):
        return (zone / "name").read_text().startswith("package")
    return True


def _read() -> dict[str, int]:
    """Microjoules by package; its parts, such as intel-rapl:0:0, are counted in it."""
    counters = {}
    for zone in POWERCAP.glob("intel-rapl:*"):
        if zone.name.count(":") == 1 and _is_package(zone):
            with contextlib.suppress(OSError, ValueError):
                counters[zone.name] = int((zone / "energy_uj").read_text())
    return counters
