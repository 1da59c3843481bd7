"""The environment that both sides of a comparison must share: machine, packages and settings."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.api import RunRecord
from reports.text import GIB, finite, listed, one_line

#: Memory sizes within this factor count as equal: kernels of the same machine type reserve different amounts.
_SAME_SIZE = 1.03
#: The items of the machine that decide a launch's speed.
_MACHINE = ("cpu", "cpu_flags", "cores_usable", "numa_nodes", "ram_bytes", "swap_bytes", "gpus", "os")


def machine_of(record: RunRecord) -> dict[str, str | float]:
    """The machine's items of a record, as text or bytes."""
    machine = record.provenance.get("machine")
    machine = machine if isinstance(machine, Mapping) else {}
    return {f"machine.{key}": _value(key, machine[key]) for key in _MACHINE if key in machine}


def environment_of(record: RunRecord, engines: bool = False) -> dict[str, str | float]:
    """Environment items of a record, as text or bytes; with `engines` the machine only, since engines differ in
    packages."""
    known = record.provenance
    items = machine_of(record)
    if record.memory:
        items["memory.method"] = record.memory.method
    if engines:
        return items
    for section in ("packages", "settings"):
        if isinstance(values := known.get(section), Mapping):
            items |= {f"{section}.{name}": str(value) for name, value in values.items()}
    return items | ({"python": str(known["python"])} if "python" in known else {})


def differing(
    base: Sequence[RunRecord], head: Sequence[RunRecord], allow: Sequence[str] = (), engines: bool = False
) -> list[str]:
    """Describes each environment item that is not the same in all records; `allow` excludes items (`packages.torch`) or
    whole sections (`packages`)."""
    sides = [[(r, environment_of(r, engines)) for r in side if r.status != "interrupted"] for side in (base, head)]
    keys = {key: None for side in sides for _, items in side for key in items}
    differences = []
    for key in keys:
        if any(key == a or key.startswith(f"{a}.") for a in allow):
            continue
        # a failed launch may have ended before it recorded the item
        old, new = (
            {items.get(key, "unknown") for r, items in side if key in items or r.status == "ok"} for side in sides
        )
        if not _alike(old | new):
            differences.append(one_line(f"{key} was {_joined(old)}, is {_joined(new)}"))
    return differences


def machines(records: Sequence[RunRecord]) -> int:
    """The number of different machines that the records come from."""
    return len(set(numbered_machines([[r] for r in records])) - {None})


def numbered_machines(groups: Iterable[Sequence[RunRecord]]) -> list[int | None]:
    """A number for each group's machine, as its first record that has one tells; None where none does."""
    distinct: list[dict[str, str | float]] = []
    numbers: list[int | None] = []
    for records in groups:
        known = (machine_of(r) for r in records if not r.simulated and r.provenance.get("machine"))
        if (machine := next(known, None)) is None:
            numbers.append(None)
            continue
        same = (
            i
            for i, d in enumerate(distinct)
            if machine.keys() == d.keys() and all(_alike({machine[k], d[k]}) for k in d)
        )
        numbers.append(next(same, len(distinct)))
        if numbers[-1] == len(distinct):
            distinct.append(machine)
    return numbers


def _value(key: str, value: Any) -> str | float:
    if key.endswith("_bytes") and (size := finite(value)) is not None:
        return size
    if isinstance(value, Sequence) and not isinstance(value, str):
        return listed(value) or "none"
    return str(value)


def _alike(values: set[str | float]) -> bool:
    """Whether all values are equal, sizes within _SAME_SIZE."""
    if all(isinstance(v, float) for v in values):
        sizes = [float(v) for v in values]
        return max(sizes, default=0.0) <= _SAME_SIZE * min(sizes, default=0.0)
    return len(values) <= 1


def _joined(values: set[str | float]) -> str:
    texts = {f"{v / GIB:.2f} GiB" if isinstance(v, float) else v for v in values}
    return " or ".join(sorted(texts))
