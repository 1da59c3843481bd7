"""The name, workload and settings of a record's cell as text."""

from __future__ import annotations

from harness.api import RunRecord, RunSpec, to_json
from reports.text import flat, one_line


def name_of(record: RunRecord) -> str:
    """The cell's name in the suite, or else its engine's name."""
    return one_line(record.spec.name) or one_line(record.spec.engine)


def workload_of(record: RunRecord) -> str:
    """The model and the workload as text; cells with the same text are comparable."""
    model = record.spec.model
    details = [f"revision {model.revision}"] if model.revision else []
    details += ["dummy weights"] if model.weights == "dummy" else []
    details += [f"stored as {model.dtype}"] if model.dtype != "auto" else []
    name = f"{model.id} ({', '.join(details)})" if details else model.id
    return one_line(f"{name}, {record.spec.workload.words}")


def settings_of(spec: RunSpec) -> dict[str, object]:
    """Settings by path, such as `policy.schedule`."""
    return flat(to_json(spec))
