"""The machine of records in a line: CPU, cores, RAM, disk, GPUs."""

from collections.abc import Mapping, Sequence

from harness.api import RunRecord
from reports.text import GIB, finite, listed, median, number, one_line, plural


def machine_words(records: Sequence[RunRecord]) -> str:
    """What these records ran on, as one machine; empty where none recorded it, or all are simulated.

    The disk's rate is the median over the probes of the run.
    """
    known = next((m for r in reversed(records) if not r.simulated and (m := _machine(r))), None)
    if known is None:
        return ""
    parts = [one_line(str(known["cpu"]))] if known.get("cpu") else []
    if cores := finite(known.get("cores_usable")):
        parts.append(plural(int(cores), "core"))
    if ram := finite(known.get("ram_bytes")):
        parts.append(f"{number(ram / GIB)} GiB of RAM")
    rates = [median([finite(v) for v in r.machine.disk_read]) for r in records if r.machine and not r.simulated]
    if disk := median(rates):
        parts.append(f"disk {number(disk / 1e9)} GB/s")
    gpus = known.get("gpus")
    if isinstance(gpus, list | tuple):
        parts.append(one_line(listed(gpus)) or "no GPU")
    return ", ".join(parts)


def _machine(record: RunRecord) -> Mapping[str, object]:
    machine = record.provenance.get("machine")
    return machine if isinstance(machine, Mapping) else {}
