"""`harness check-model`: errors of the performance model against published figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import hardware, registry

#: A published figure beside its prediction; engines/planning/published.py names the keys.
Cell = Mapping[str, Any]


@dataclass(frozen=True)
class GroupErrors:
    """Absolute relative errors of one engine on one machine: of cells that no constant was fitted on, and of others."""

    hardware: str
    engine: str
    unseen: Sequence[float]
    fitted: Sequence[float]

    @property
    def median_unseen(self) -> float:
        return statistics.median(self.unseen)

    @property
    def median_fitted(self) -> float | None:
        return statistics.median(self.fitted) if self.fitted else None


def published_cells() -> Sequence[Cell]:
    """Every published figure with its prediction and error."""
    return registry.published_figures().table({name: hardware.load(name) for name in hardware.names()})


def errors_by_group(cells: Sequence[Cell]) -> list[GroupErrors]:
    """Errors by hardware and engine; repeated cells, and those without a prediction, do not count."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell["hardware"], cell["engine"]), []).append(cell)
    found = []
    for (machine, engine), members in groups.items():
        known = [cell for cell in members if cell["error"] is not None and not cell["repeated"]]
        unseen = [abs(cell["error"]) for cell in known if not cell["fitted"]]
        fitted = [abs(cell["error"]) for cell in known if cell["fitted"]]
        found.append(GroupErrors(machine, engine, unseen, fitted))
    return found
