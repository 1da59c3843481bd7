"""Names cells by what tells them apart: short, unique in the suite and safe as file names."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from harness.api import HarnessError, RunSpec

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
MAX_CELL_NAME = 128


@dataclass(frozen=True)
class Cell:
    """A cell before it has its name; `at` is where it was written, `entry` which matrix entry made it."""

    spec: RunSpec
    at: str
    entry: Hashable


_Part = Callable[[RunSpec], str]


def _model(spec: RunSpec) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", spec.model.id.rstrip("/").rsplit("/", 1)[-1])


def _lengths(spec: RunSpec) -> str:
    return f"p{spec.workload.prompt_len}g{spec.workload.gen_len}"


def _batch(spec: RunSpec) -> str:
    return "max_batch" if spec.tune == "max_batch" else f"b{spec.policy.gpu_batch_size}x{spec.policy.num_gpu_batches}"


_INPUTS: tuple[_Part, ...] = (_model, _lengths)
_CHOICES: tuple[_Part, ...] = (
    lambda spec: spec.policy.compute_dtype,
    lambda spec: spec.policy.schedule,
    _batch,
    lambda spec: f"w{spec.policy.weight_bits}kv{spec.policy.kv_bits}",
    lambda spec: f"seed{spec.seed}",
)


def name_cells(cells: Sequence[Cell]) -> list[RunSpec]:
    """The cells' specs with their final names.

    A cell without a name is called after its engine, then model and lengths where the suite has several,
    then compute dtype, schedule, batch, bits and seed where they vary among that engine's cells. A given
    name is kept; only where one matrix entry meets several models or workloads are they added to it.
    Raises HarnessError for a name that is no safe file name, and for two cells of one name.
    """
    groups: dict[Hashable, list[RunSpec]] = {}
    for cell in cells:
        groups.setdefault(_group(cell), []).append(cell.spec)
    everywhere = _varying(_INPUTS, [cell.spec for cell in cells])
    parts = {
        key: _varying(_INPUTS, specs) if specs[0].name else (*everywhere, *_varying(_CHOICES, specs))
        for key, specs in groups.items()
    }
    taken: dict[str, Cell] = {}
    named = []
    for cell in cells:
        head = cell.spec.name or cell.spec.engine
        name = "-".join([head, *(part(cell.spec) for part in parts[_group(cell)])])
        if not SAFE_NAME.fullmatch(name) or len(name) > MAX_CELL_NAME:
            raise HarnessError(
                f"{cell.at}: cell name {name[: MAX_CELL_NAME + 1]!r} must be at most {MAX_CELL_NAME} letters, digits, "
                "'.', '_' or '-', and begin with a letter or digit; give the cell another name"
            )
        other = taken.setdefault(name.lower(), cell)  # some file systems do not tell A from a
        if other is not cell:
            raise HarnessError(
                f"{cell.at}: cell name {name!r} is taken by the cell at {other.at}; give one of the two another name"
            )
        named.append(replace(cell.spec, name=name))
    return named


def _group(cell: Cell) -> Hashable:
    return (cell.spec.name, cell.entry) if cell.spec.name else cell.spec.engine


def _varying(parts: Sequence[_Part], specs: Sequence[RunSpec]) -> tuple[_Part, ...]:
    return tuple(part for part in parts if len({part(spec) for spec in specs}) > 1)
