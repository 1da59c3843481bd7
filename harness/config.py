"""Turns a suite file into a SuiteSpec: layers of YAML merged into cells, each checked against harness.api.

Every layer (the suite's own keys, one of its workloads, one of its models, a matrix entry, a --set option)
is first brought into the shape of a RunSpec; a cell is one of each, merged in that order. Positions travel
with the values, so a message points at the layer that set the wrong one.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from harness import yaml_source
from harness.api import (
    HardwareLimits,
    HardwareRequirements,
    HarnessError,
    ModelSpec,
    OffloadPolicy,
    RunSpec,
    SuiteSpec,
    WorkloadSpec,
)
from harness.cell_names import SAFE_NAME, Cell, name_cells
from harness.registry import ENGINES
from harness.yaml_source import Node, shown

MAX_CELLS = 10_000
MAX_LAUNCHES = 100_000
MAX_VALUES = 2_000_000  # of all cells together
MAX_ERRORS = 20
MAX_SIZE = 1 << 50
MAX_SUITE_NAME = 64

_SHORTHANDS = ("schedule", "compute_dtype")  # for keys of `policy`
_DEFAULTS = (
    *("engine", "options", "model", "workload", "policy", *_SHORTHANDS, "tune"),
    *("repeats", "warmup", "seed", "timeout", "expect", "reference"),
)
CELL_KEYS = ("name", "limits", *_DEFAULTS)
SUITE_KEYS = ("name", "description", "hardware", "machine_probe", "matrix", *_DEFAULTS)

_SECTIONS = {
    "model": ModelSpec,
    "workload": WorkloadSpec,
    "policy": OffloadPolicy,
    "limits": HardwareLimits,
    "requires": HardwareRequirements,
}
_COUNT = (1, 1 << 31)
_RANGES = {
    "repeats": (1, 1000),
    "warmup": (0, 100),
    "seed": (0, (1 << 32) - 1),
    "timeout_s": (1e-3, 30 * 86400),
    "workload.prompt_len": _COUNT,
    "workload.gen_len": _COUNT,
    "workload.num_requests": _COUNT,
    "limits.threads": _COUNT,
    "limits.device_memory": (1, MAX_SIZE),
    "limits.host_memory": (1, MAX_SIZE),
}
_REQUIRES_RANGES = {f"requires.{f.name}": (0, MAX_SIZE) for f in fields(HardwareRequirements)}

_WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list of three fractions",
}

T = TypeVar("T")


@dataclass(frozen=True)
class _Header:
    """The keys of a suite that belong to no cell."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    name: str
    description: str = ""
    requires: HardwareRequirements = HardwareRequirements()
    machine_probe: bool = True


_HEADER = TypeAdapter(_Header)
_RUN_SPEC = TypeAdapter(RunSpec)


# --------------------------------------------------------------------------- sizes and durations

_SIZES = (
    {"B": 1}
    | {f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)}
    | {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
)
_DURATIONS = {"ms": Decimal("0.001"), "s": 1, "min": 60, "h": 3600, "d": 86400}
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([A-Za-z]{1,9})", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes in `16GiB`, `208GB`, `1.5 MiB`. Raises HarnessError for anything else or above 1 PiB."""
    size = int(_quantity(text, _SIZES, "a size such as 16GiB, 208GB or 600MiB"))
    if size > MAX_SIZE:
        raise HarnessError(f"{shown(text)} is more than 1 PiB")
    return size


def parse_duration(text: str) -> float:
    """Seconds in `90s`, `20min`, `1.5h`. Raises HarnessError for anything else."""
    return float(_quantity(text, _DURATIONS, "a duration such as 90s, 20min or 1h"))


def _quantity(text: str, units: dict[str, Any], wanted: str) -> Decimal:
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise HarnessError(f"expected {wanted}, got {shown(text)}")
    number, unit = match.groups()
    known = {name.lower(): factor for name, factor in units.items()}
    if unit.lower() not in known:
        raise HarnessError(f"expected {wanted}, got {shown(text)}: unknown unit {unit!r}; known: {', '.join(units)}")
    return Decimal(number) * known[unit.lower()]


# --------------------------------------------------------------------------- loading


def load_suite(path: Path, overrides: Sequence[str] = (), engines: Collection[str] = ENGINES) -> SuiteSpec:
    """The suite in `path`, expanded, with each `key=value` of `overrides` laid over every cell.

    Cells come workload by workload, within one model by model, within one in the order of the matrix (the
    first axis outermost), so that the engines to be compared are neighbours.

    In a cell mappings merge over the suite's, scalars replace; `limits: none` lifts all limits. `policy:
    max_batch`, and `max_batch: true` inside a policy, mean `tune: max_batch` over the merged policy, whose
    `gpu_batch_size` is where the search starts. As an override, `policy.x=...` merges and keeps the tuning,
    `policy=...` (like `workload=...`, `model=...`, `options=...`, `limits=...`) replaces the whole and with
    it the tuning, and `tune=none` fixes the batch.

    Raises HarnessError with one line per problem: file:line:column or the --set option, what, and the
    nearest valid key.
    """
    root = yaml_source.read(path)
    if not isinstance(root.value, dict):
        raise root.error(f"a suite is a mapping of keys, got {shown(root.value)}")
    _refuse_unknown(root, SUITE_KEYS, "suite")
    hardware = root.entries.get("hardware", Node({}, root.at))
    if not isinstance(hardware.value, dict):
        raise hardware.error(f"hardware: expected a mapping, got {shown(hardware.value)}")
    _refuse_unknown(hardware, ("requires", "limits"), "hardware")

    header = _header(root, hardware)
    base = Node({key: root.entries[key] for key in _DEFAULTS if key in root.entries}, root.at)
    if "limits" in hardware.entries:
        base = base.merged(_under(hardware.entries["limits"], "limits"))
    cells = _expand(root, base, [_override(text) for text in overrides], engines)
    if (launches := sum(cell.spec.repeats for cell in cells)) > MAX_LAUNCHES:
        raise root.error(
            f"{len(cells):,} cells make {launches:,} launches with their repeats; at most {MAX_LAUNCHES:,}"
        )
    specs = tuple(replace(spec, suite=header.name) for spec in name_cells(cells))
    return SuiteSpec(header.name, header.description, specs, header.requires, header.machine_probe)


def _header(root: Node, hardware: Node) -> _Header:
    keys = {key: root.entries[key] for key in ("name", "description", "machine_probe") if key in root.entries}
    if "requires" in hardware.entries:
        keys["requires"] = _in_units(hardware.entries["requires"], parse_size)
    node = Node(keys, root.at)
    header = _checked(_HEADER, node, "suite")
    _check_ranges(header, node, _REQUIRES_RANGES)
    if not SAFE_NAME.fullmatch(header.name) or len(header.name) > MAX_SUITE_NAME:
        raise node.find(["name"]).error(
            f"name {shown(header.name)} must be at most {MAX_SUITE_NAME} letters, digits, '.', '_' or '-', "
            "and begin with a letter or digit"
        )
    return header


def _expand(root: Node, base: Node, overrides: Sequence[_Override], engines: Collection[str]) -> list[Cell]:
    """All cells, checked. The product is counted before any of it is made."""
    axes = [[base.without("workload", "model")]]
    axes += [_axis(base.entries[key], key) for key in ("workload", "model") if key in base.entries]
    given = len(axes)
    axes += _matrix(root.entries["matrix"]) if "matrix" in root.entries else []
    if (count := math.prod(len(axis) for axis in axes)) > MAX_CELLS:
        raise root.find(["matrix"]).error(f"expands to {count:,} cells; at most {MAX_CELLS:,}")

    axes = [_each(_layer, axis) for axis in axes]
    values = 0
    merged = []
    for combination in itertools.product(*(enumerate(axis) for axis in axes)):
        node = reduce(Node.merged, (layer for _, layer in combination))
        for override in overrides:
            node = node.without(*override.replaced).merged(override.layer)
        values += node.size
        if values > MAX_VALUES:
            raise root.find(["matrix"]).error(f"expands to cells of more than {MAX_VALUES:,} values together")
        at = combination[-1][1].at
        merged.append((node, at, tuple(index for index, _ in combination[given:])))
    return _each(lambda cell: Cell(_run_spec(cell[0], engines), *cell[1:]), merged)


def _matrix(matrix: Node) -> list[list[Node]]:
    """The axes of a matrix: one of whole entries, or one per key."""
    if not matrix.children:
        raise matrix.error(
            "matrix: expected a list of cells, or a mapping of keys to lists of values, with something in it"
        )
    return [matrix.items] if matrix.items else [_axis(values, key) for key, values in matrix.entries.items()]


def _axis(values: Node, key: str) -> list[Node]:
    """A layer for each of several values of one key, or for the one value."""
    if values.value == []:
        raise values.error(f"{key}: the list is empty")
    return [_under(value, key) for value in values.items or [values]]


# --------------------------------------------------------------------------- one layer


@dataclass(frozen=True)
class _Override:
    """A --set option: a layer for every cell, and the keys of the cell it takes the place of."""

    layer: Node
    replaced: tuple[str, ...]


def _override(text: str) -> _Override:
    key, equals, value = text.partition("=")
    label = f"--set {text if len(text) <= 100 and text.isprintable() else shown(text)}"
    parts = key.split(".")
    if not equals or not all(parts) or len(parts) > yaml_source.MAX_DEPTH:
        raise HarnessError(f"{label}: expected key=value, such as repeats=1 or policy.schedule=row")
    node = yaml_source.parse(value, label, positions=False)
    layer = _layer(reduce(_under, reversed(parts), node))
    if len(parts) > 1:
        return _Override(layer, ())
    return _Override(layer, ("policy", "tune") if key == "policy" else (key,))


def _under(node: Node, key: str) -> Node:
    """The mapping `{key: node}` with all positions kept."""
    return Node({key: replace(node, key_at=node.key_at or node.at)}, node.at)


def _layer(node: Node) -> Node:
    """What a mapping of cell keys sets, in the shape of a RunSpec: shorthands spelled out, units resolved."""
    if not isinstance(node.value, dict):
        raise node.error(f"expected a mapping of cell keys, got {shown(node.value)}")
    _refuse_unknown(node, CELL_KEYS, "cell")
    entries = dict(node.value)
    found = [_tuning(entries.pop("policy"))] if "policy" in entries else []
    found += [_under(_under(entries.pop(key), key), "policy") for key in _SHORTHANDS if key in entries]
    if "timeout" in entries:
        found.append(_under(_in_unit(entries.pop("timeout"), parse_duration), "timeout_s"))
    if "limits" in entries:
        limits = entries["limits"]
        entries["limits"] = replace(limits, value={}) if limits.value in (None, "none") else limits
    return reduce(_joined, found, Node(entries, node.at, node.key_at))
