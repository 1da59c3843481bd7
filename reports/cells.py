"""What a record says of its cell, in words: its name, its workload, its settings."""

from __future__ import annotations

from harness.api import RunRecord, RunSpec, to_json
from reports.text import flat, one_line


def name_of(record: RunRecord) -> str:
    """What people call the cell: the suite's name for it, or else its engine's."""
    return one_line(record.spec.name) or one_line(record.spec.engine)


def workload_of(record: RunRecord) -> str:
    """What was asked of which model, in words: cells with the same words may be compared."""
    model, load = record.spec.model, record.spec.workload
    details = [f"revision {model.revision}"] if model.revision else []
    details += ["dummy weights"] if model.weights == "dummy" else []
    details += [f"stored as {model.dtype}"] if model.dtype != "auto" else []
    shown = f"{model.id} ({', '.join(details)})" if details else model.id
    return one_line(f"{shown}, {load.words}")


def settings_of(spec: RunSpec) -> dict[str, object]:
    """Every setting by its path, such as `policy.schedule`."""
    return flat(to_json(spec))
