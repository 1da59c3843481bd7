"""`harness check-model`: errors of the performance model against published figures."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from harness import hardware, registry

#: A published figure beside its prediction; engines/planning/published.py names the keys.
Cell = Mapping[str, Any]


class Errors(NamedTuple):
    """Absolute relative errors: of cells that no constant was fitted on, and of those that one was."""

    unseen: list[float]
    fitted: list[float]


def published_cells() -> Sequence[Cell]:
    """Every published figure with its prediction and error."""
    return registry.published_figures().table({name: hardware.load(name) for name in hardware.names()})


def errors_by_group(cells: Sequence[Cell]) -> dict[tuple[str, str], Errors]:
    """Errors by hardware and engine; repeated cells, and those without a prediction, do not count."""
    groups: dict[tuple[str, str], Errors] = {}
    for cell in cells:
        errors = groups.setdefault((cell["hardware"], cell["engine"]), Errors([], []))
        if cell["error"] is not None and not cell["repeated"]:
            (errors.fitted if cell["fitted"] else errors.unseen).append(abs(cell["error"]))
    return groups
