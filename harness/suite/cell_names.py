"""Cell names: short, unique in the suite, safe as file names, and built from the settings in which cells differ."""

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from harness.api import HarnessError, RunSpec
from harness.common.files import MAX_SAFE_NAME, SAFE_NAME

NAME_RULE = "letters, digits, '.', '_' or '-', the first a letter or digit"
MAX_CELL_NAME = MAX_SAFE_NAME

_Part = Callable[[RunSpec], str]


@dataclass(frozen=True)
class Cell:
    """A cell before it gets its final name, with the positions of the layers it was merged from.

    `layers` holds the positions of all layers, `entry` those of the matrix only.
    """

    spec: RunSpec
    layers: tuple[str, ...]
    entry: tuple[str, ...]

    @property
    def group(self) -> Hashable:
        """The key of the group of cells within which the settings added to a name must make it unique."""
        return (self.spec.name, self.entry) if self.spec.name else self.spec.engine


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)


_CHOICES: tuple[_Part, ...] = (
    lambda spec: spec.policy.compute_dtype,
    lambda spec: spec.policy.schedule,
    lambda spec: f"b{spec.policy.gpu_batch_size}x{spec.policy.num_gpu_batches}" if spec.tune == "none" else spec.tune,
    lambda spec: f"w{spec.policy.weight_bits}kv{spec.policy.kv_bits}",
    lambda spec: "any-latency" if spec.latency_s is None else f"{spec.latency_s:g}s",
    lambda spec: f"seed{spec.seed}",
    lambda spec: spec.launcher,
)
_INPUTS: tuple[_Part, ...] = (
    lambda spec: _safe(spec.workload.label),
    lambda spec: _safe(spec.model.id.rstrip("/").rsplit("/", 1)[-1]),
)


def name_cells(cells: Sequence[Cell]) -> list[RunSpec]:
    """The cells' specs with their final names.

    The default name is the engine, then each of compute dtype, schedule, batch, bits, latency, seed and launcher that
    varies among that engine's cells, then lengths and model if they vary in the suite. A name from the suite is kept;
    if its matrix entry expands over several workloads or models, these are added.
    Raises HarnessError for a name that is not a safe file name, and for two cells with the same name.
    """
    groups: dict[Hashable, list[RunSpec]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell.spec)
    inputs = _varying(_INPUTS, [cell.spec for cell in cells])
    parts = {
        group: _varying(_INPUTS, specs) if specs[0].name else (*_varying(_CHOICES, specs), *inputs)
        for group, specs in groups.items()
    }
    taken: dict[str, Cell] = {}
    named = []
    for cell in cells:
        head = cell.spec.name or cell.spec.engine
        name = "-".join([head, *(part(cell.spec) for part in parts[cell.group])])
        if not SAFE_NAME.fullmatch(name) or len(name) > MAX_CELL_NAME:
            raise HarnessError(
                f"{cell.layers[-1]}: cell name {name[:MAX_CELL_NAME]!r} must be at most {MAX_CELL_NAME} {NAME_RULE}; "
                "give the cell another name"
            )
        other = taken.setdefault(name.lower(), cell)  # some file systems ignore case
        if other is not cell:
            raise _clash(cell, other, name)
        named.append(replace(cell.spec, name=name))
    return named


def _varying(parts: Sequence[_Part], specs: Sequence[RunSpec]) -> tuple[_Part, ...]:
    return tuple(part for part in parts if len({part(spec) for spec in specs}) > 1)


def _clash(cell: Cell, other: Cell, name: str) -> HarnessError:
    """The error for two cells with one name. It points at the first layer in which they differ."""
    pairs = zip(cell.layers, other.layers, strict=True)
    at, other_at = next((pair for pair in pairs if pair[0] != pair[1]), (cell.layers[-1], other.layers[-1]))
    return HarnessError(f"{at}: cell name {name!r} is already used by the cell from {other_at}; rename one of them")


def find_twins(specs: Sequence[RunSpec]) -> tuple[str, str] | None:
    """Names of the first two cells with equal fingerprints, whose records could not be distinguished; else None."""
    first: dict[str, str] = {}
    for spec in specs:
        if (twin := first.setdefault(spec.fingerprint(), spec.name)) != spec.name:
            return twin, spec.name
    return None
