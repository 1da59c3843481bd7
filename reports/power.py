"""What a token costs in joules and dollars: measured by counters, declared by a profile, and what that is worth.

A counter measures parts of a machine (RAPL: CPU packages; NVML: a device), with whatever else runs on them; RAM, disks
and power supplies have none. Declared watts and prices are those of the hardware profile, for the whole machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.api import RunRecord
from harness.api.record import DISTURBED
from reports.summary import CellSummary, metric, throughput
from reports.tables import Cell, Column, Table, name_cell, plain_table
from reports.text import MISSING, columns_of, finite, median, number, quotient

#: The counters of energy, by measurement.
_COUNTERS = {"energy_j": "CPU packages (RAPL)", "device_energy_j": "device (NVML)"}
#: Shorter phases say little: drivers refresh their counters up to ten times a second.
SHORTEST_S = 1.0
_COLUMNS = (
    Column("Cell", numeric=False),
    Column("Measured", "W"),
    Column("Declared", "W"),
    Column("Measured", "J/token"),
    Column("Declared", "J/token"),
    Column("Cost", "$/million tokens"),
    Column("What the measured joules are worth", numeric=False, wide=True),
)


@dataclass(frozen=True)
class Energy:
    """The energy of a launch's generation. `own`: the share of the CPU time used that was the launch's own, None if not
    recorded; `busy`: the share of the cores' time that it used."""

    joules: float
    seconds: float
    tokens: float
    counters: tuple[str, ...]
    own: float | None
    busy: float | None

    @property
    def watts(self) -> float:
        """Mean power of the parts that have counters."""
        return self.joules / self.seconds

    @property
    def fault(self) -> str:
        """Why the joules are not those of the launch; empty where nothing speaks against it."""
        if self.seconds < SHORTEST_S:
            return f"{number(self.seconds)} s are shorter than counters need ({number(SHORTEST_S)} s)"
        if self.own is None:
            return "whose CPU time it was is not recorded"
        if 1 - self.own > DISTURBED:
            return f"others took {1 - self.own:.0%} of the CPU time, and a counter cannot tell whose joules are whose"
        return ""


def energy_of(record: RunRecord) -> Energy | None:
    """What counters say of a launch; None where it has none, or generated nothing."""
    found = {words: joules for name, words in _COUNTERS.items() if (joules := finite(record.total(name, "generate")))}
    seconds, tokens = (finite(v) for v in (record.total("wall_s", "generate"), record.metrics.get("generated_tokens")))
    if not found or not seconds or not tokens or min(found.values()) < 0:
        return None
    own, other, kernel, steal = (
        finite(record.total(f"cpu_{name}_s", "generate")) for name in ("own", "other", "kernel", "steal")
    )
    taken = None if other is None else other + (steal or 0.0)
    used = None if own is None or taken is None else own + taken + (kernel or 0.0)
    machine = record.provenance.get("machine")
    cores = finite(machine.get("cores_usable")) if isinstance(machine, Mapping) else None
    return Energy(
        joules=sum(found.values()),
        seconds=seconds,
        tokens=tokens,
        counters=tuple(found),
        own=None if taken is None or not used else 1 - taken / used,
        busy=quotient(own, seconds * cores if cores else None),
    )


def joules_per_token(row: CellSummary) -> float | None:
    """Measured joules for a generated token, the median over launches; None without a counter."""
    return median([e.joules / e.tokens for e in map(energy_of, row.ok_records) if e])


def power_table(rows: Sequence[CellSummary]) -> Table | None:
    """Power and cost of each cell, measured and declared; None where nothing was measured or declared."""
    lines = [_line(row) for row in rows]
    if not any(value is not None for values, _ in lines for value in values):
        return None
    columns = [columns_of(column) for column in zip(*(values for values, _ in lines), strict=True)]
    why = ("no counter", "no declared power", "no counter", "no declared power", "no declared price")
    cells = [
        [name_cell(row), *(Cell(text, why=w if text == MISSING else "") for text, w in zip(texts, why, strict=True)), v]
        for row, texts, (_, v) in zip(rows, zip(*columns, strict=True), lines, strict=True)
    ]
    return plain_table("Power and cost: measured by counters, declared by the hardware profile", _COLUMNS, cells)


def _line(row: CellSummary) -> tuple[tuple[float | None, ...], Cell]:
    """Measured and declared watts, both joules for a token, dollars for a million tokens; and the verdict."""
    energies = [e for e in map(energy_of, row.ok_records) if e]
    declared = quotient(1.0, metric(row.ok_records, "tokens_per_joule"))  # joules for a token
    watts = median([quotient(throughput(r), finite(r.metrics.get("tokens_per_joule"))) for r in row.ok_records])
    cost = quotient(1e6, metric(row.ok_records, "tokens_per_dollar"))
    values = (median([e.watts for e in energies]), watts, joules_per_token(row), declared, cost)
    return values, _verdict(energies, watts)


def _verdict(energies: Sequence[Energy], declared: float | None) -> Cell:
    """What was measured, for how long, what share of the machine it was, and whether the joules are the cell's."""
    if not energies:
        words = (
            "not measured: no counter; declared watts hold whatever the machine really drew" if declared else MISSING
        )
        return Cell(words, tone="muted", why="" if declared else "nothing measured or declared")
    parts = [f"{' and '.join(energies[0].counters)} over {number(median([e.seconds for e in energies]) or 0.0)} s"]
    if (own := median([e.own for e in energies])) is not None:
        parts.append(f"{own:.0%} of the CPU time used was its own")
    if (busy := median([e.busy for e in energies])) is not None:
        parts.append(f"{busy:.0%} of the cores' time")
    if declared and (watts := median([e.watts for e in energies])):
        parts.append(f"{watts / declared:.0%} of the declared power")
    fault = next((e.fault for e in energies if e.fault), "")
    words = "; ".join(parts)
    return Cell(f"not valid: {fault}; {words}", tone="bad") if fault else Cell(f"valid for {words}")
