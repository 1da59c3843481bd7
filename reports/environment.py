"""What must be the same on both sides of a comparison: the machine, and the packages that the engines run with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.api import RunRecord
from reports.text import GIB, finite, one_line

#: Memory of so many times another's is still of its class.
_SAME_SIZE = 1.03
#: Of the machine, what decides how fast a launch is.
_MACHINE = ("cpu", "cpu_flags", "cores_usable", "numa_nodes", "ram_bytes", "swap_bytes", "gpus", "os")


def environment_of(record: RunRecord, engines: bool = False) -> dict[str, str | float]:
    """Item and value, in words or bytes; `engines`: of the machine alone, as engines differ in their packages."""
    known = record.provenance
    machine = known.get("machine")
    machine = machine if isinstance(machine, Mapping) else {}
    found: dict[str, str | float] = {f"machine.{key}": _value(key, machine[key]) for key in _MACHINE if key in machine}
    if record.memory:
        found["memory.method"] = record.memory.method
    if engines:
        return found
    packages = known.get("packages")
    if isinstance(packages, Mapping):
        found |= {f"packages.{name}": str(version) for name, version in packages.items()}
    settings = known.get("settings")
    if isinstance(settings, Mapping):
        found |= {f"settings.{name}": str(value) for name, value in settings.items()}
    return found | ({"python": str(known["python"])} if "python" in known else {})


def differing(
    base: Sequence[RunRecord], head: Sequence[RunRecord], allow: Sequence[str] = (), engines: bool = False
) -> list[str]:
    """In words, which items of the environment are not the same in all these records; `allow` leaves some out, by name
    or by the beginning of it before a dot."""
    sides = [[(r, environment_of(r, engines)) for r in side if r.status != "interrupted"] for side in (base, head)]
    items = {key: None for side in sides for _, found in side for key in found}
    differences = []
    for key in items:
        if any(key == a or key.startswith(f"{a}.") for a in allow):
            continue
        # a launch that failed may not have come so far as to say
        old, new = (
            {found.get(key, "unknown") for r, found in side if key in found or r.status == "ok"} for side in sides
        )
        if not _alike(old | new):
            differences.append(one_line(f"{key} {_joined(old)} is {_joined(new)}"))
    return differences


def machines(records: Sequence[RunRecord]) -> int:
    """How many different machines the records are of."""
    seen = [
        {k: v for k, v in environment_of(r, engines=True).items() if k.startswith("machine.")}
        for r in records
        if not r.simulated and r.provenance.get("machine")
    ]
    kinds: list[dict[str, str | float]] = []
    for machine in seen:
        if not any(machine.keys() == k.keys() and all(_alike({machine[i], k[i]}) for i in k) for k in kinds):
            kinds.append(machine)
    return len(kinds)


def _value(key: str, value: Any) -> str | float:
    if key.endswith("_bytes") and (size := finite(value)) is not None:
        return size
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(" ".join(map(str, v.values())) if isinstance(v, Mapping) else str(v) for v in value) or "none"
    return str(value)


def _alike(values: set[str | float]) -> bool:
    """Whether values are one. Of one class of machines, kernels keep a little more or less memory for themselves."""
    if all(isinstance(v, float) for v in values):
        sizes = [float(v) for v in values]
        return max(sizes, default=0.0) <= _SAME_SIZE * min(sizes, default=0.0)
    return len(values) <= 1


def _joined(values: set[str | float]) -> str:
    words = {f"{v / GIB:.2f} GiB" if isinstance(v, float) else v for v in values}
    return " or ".join(sorted(words))
