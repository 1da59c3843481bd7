"""Turns a suite file into a SuiteSpec: layers of YAML merged into cells, each checked against harness.api.

Every layer (the suite's own keys, one of its workloads, one of its models, a matrix entry, a --set option)
is first brought into the shape of a RunSpec; a cell merges one layer of each kind, in that order. Values keep
their positions, so an error points at the layer that set the wrong value.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, get_args

from harness.api import HardwareLimits, HardwareRequirements, HarnessError, RunSpec, SuiteSpec, Tune
from harness.common.units import parse_duration, parse_size
from harness.suite import check as suite_check
from harness.suite import yaml_source
from harness.suite.cell_names import Cell, find_twins, name_cells
from harness.suite.yaml_node import Node, shown

MAX_CELLS = 10_000
MAX_LAUNCHES = 100_000
MAX_VALUES = 2_000_000  # in all cells together

_TUNED = tuple(tune for tune in get_args(Tune) if tune != "none")
_POLICY_SHORTHANDS = ("schedule", "compute_dtype")
_DURATIONS = ("timeout", "latency")
_DEFAULTS = (
    *("engine", "options", "env", "model", "workload", "policy", *_POLICY_SHORTHANDS, "tune", "candidates"),
    *("repeats", "warmup", "seed", *_DURATIONS, "expect", "reference", "launcher", "image"),
)
_SIZE_KEYS = (*(field.name for field in fields(HardwareRequirements)), "disk_bandwidth")
CELL_KEYS = ("name", "limits", *_DEFAULTS)
SUITE_KEYS = ("name", "description", "reproduces", "hardware", "machine_probe", "matrix", *_DEFAULTS)


def load_suite(path: Path, overrides: Sequence[str] = ()) -> SuiteSpec:
    """The expanded suite in `path`, with each `key=value` of `overrides` applied to every cell.

    Cells are ordered by workload, then model, then the order of the matrix (its first axis outermost), so that
    engines to compare are neighbours.

    A cell's mappings merge over the suite's and its scalars replace them; `limits: none` lifts the limits. `policy:
    max_batch`, or `max_batch: true` inside a policy, means `tune: max_batch` over the merged policy, and the search
    starts at its `gpu_batch_size`; `tune: none` keeps that batch. `candidates: {options.NAME: [values]}`, or with
    `policy.FIELD` or `env.NAME`, lists values to try beside the cell's own. As an override, `policy.x=v` merges and
    keeps the tuning; `policy=v` replaces the whole policy and its tuning; `workload=v`, `model=v`, `options=v` and
    `limits=v` replace the whole section.

    Raises HarnessError with a line for each problem: file:line:column or the --set option, what is wrong,
    and the nearest valid key.
    """
    root = yaml_source.read(path)
    if not isinstance(root.value, dict):
        raise root.error(f"a suite is a mapping of keys, got {shown(root.value)}")
    suite_check.refuse_unknown(root, SUITE_KEYS, "suite")
    hardware = root.entries.get("hardware", Node({}, root.at))
    if not isinstance(hardware.value, dict):
        raise hardware.error(f"hardware: expected a mapping, got {shown(hardware.value)}")
    suite_check.refuse_unknown(hardware, ("requires", "limits"), "hardware")

    header = suite_check.header(_header(root, hardware))
    base = replace(root.only(*_DEFAULTS).merged(hardware.only("limits")), at=root.at)
    cells = _expand(base, root.only("matrix"), suite_check.each(_override, overrides))
    launches = sum(cell.spec.repeats for cell in cells)
    if launches > MAX_LAUNCHES:
        raise root.error(f"{len(cells):,} cells make {launches:,} launches; at most {MAX_LAUNCHES:,} are allowed")
    specs = tuple(replace(spec, suite=header.name) for spec in name_cells(cells))
    twins = None if overrides else find_twins(specs)  # --set may make twins of cells that are not all selected
    if twins:
        raise root.error(f"cells {twins[0]!r} and {twins[1]!r} measure the same; leave one out or change its seed")
    return SuiteSpec(header.name, header.description, specs, header.requires, header.machine_probe)


def load_cell(settings: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunSpec:
    """One cell from `settings`, written as in a suite, under `overrides`. Raises HarnessError as `load_suite` does."""
    cell = _layer(yaml_source.parse(json.dumps(settings, ensure_ascii=False), "settings", positions=False))
    return suite_check.run_spec(reduce(_apply, suite_check.each(_override, overrides), cell))


def _header(root: Node, hardware: Node) -> Node:
    entries = root.only("name", "description", "machine_probe", "reproduces").entries
    if "requires" in hardware.entries:
        entries["requires"] = _in_bytes(hardware.entries["requires"])
    return Node(entries, root.at)


def _expand(base: Node, suite: Node, overrides: Sequence[_Override]) -> list[Cell]:
    """All cells, checked. The product of the axes is counted before any cell is built."""
    axes = [[base.without("workload", "model")]]
    axes += [_axis(key, base.entries[key]) for key in ("workload", "model") if key in base.entries]
    inputs = len(axes)
    matrix = suite.entries.get("matrix")
    if matrix is not None:
        axes += _matrix(matrix)
    origin = matrix or base  # where an error about the whole expansion points
    count = math.prod(len(axis) for axis in axes)
    if count > MAX_CELLS:
        raise origin.error(f"expands to {count:,} cells; at most {MAX_CELLS:,} are allowed")

    merged, values = [], 0
    for layers in itertools.product(*suite_check.each(partial(suite_check.each, _layer), axes)):
        cell = reduce(_apply, overrides, reduce(Node.merged, layers))
        values += cell.size
        if values > MAX_VALUES:
            raise origin.error(f"expands to cells of more than {MAX_VALUES:,} values together")
        at = layers[-1].at if matrix and matrix.items else origin.at  # where an error about a missing key points
        merged.append((replace(cell, at=at), tuple(layer.at for layer in layers)))

    def checked(item: tuple[Node, tuple[str, ...]]) -> Cell:
        cell, layers = item
        return Cell(suite_check.run_spec(cell), layers, layers[inputs:])

    return suite_check.each(checked, merged)


def _matrix(matrix: Node) -> list[list[Node]]:
    """The axes of a matrix: a single axis for a list of entries, or one axis per key."""
    if not matrix.children:
        raise matrix.error(f"matrix: expected a list of cells or lists of values by key, got {shown(matrix.value)}")
    return [matrix.items] if matrix.items else [_axis(key, values) for key, values in matrix.entries.items()]


def _axis(key: str, values: Node) -> list[Node]:
    """One layer per value in a list of values for `key`; a single value makes a single layer."""
    if values.value == []:
        raise values.error(f"{key}: the list is empty")
    return [_under(replace(value, key_at=values.key_at), key) for value in values.items or [values]]


def _apply(cell: Node, override: _Override) -> Node:
    return cell.without(*override.replaced).merged(override.layer)


@dataclass(frozen=True)
class _Override:
    """A --set option: the layer it adds to every cell, and the keys of the cell it replaces."""

    layer: Node
    replaced: tuple[str, ...]


def _override(text: str) -> _Override:
    label = f"--set {text}" if len(text) <= 100 and text.isprintable() else f"--set {shown(text)}"
    key, equals, value = text.partition("=")
    parts = key.split(".")
    if not equals or not all(parts) or len(parts) > yaml_source.MAX_DEPTH:
        raise HarnessError(f"{label}: expected key=value, such as repeats=1 or policy.schedule=row")
    node = yaml_source.parse(value, label, positions=False)
    layer = _layer(reduce(_under, reversed(parts), node))
    if len(parts) > 1:
        return _Override(layer, ())
    return _Override(layer, ("policy", "tune") if key == "policy" else (key,))


def _layer(node: Node) -> Node:
    """Converts a mapping of cell keys to the shape of a RunSpec: expands shorthands and resolves units."""
    if not isinstance(node.value, dict):
        raise node.error(f"expected a mapping of cell keys, got {shown(node.value)}")
    suite_check.refuse_unknown(node, CELL_KEYS, "cell")
    parts = [node.without("policy", *_DURATIONS, "limits", *_POLICY_SHORTHANDS)]
    parts += [_under(node.only(key), "policy") for key in _POLICY_SHORTHANDS if key in node.entries]
    if "policy" in node.entries:
        parts += _policy(node.entries["policy"])
    for key in _DURATIONS:
        if key in node.entries:
            parts.append(_under(_in_unit(node.entries[key], parse_duration), f"{key}_s"))
    if "limits" in node.entries:
        parts.append(_under(_limits(node.entries["limits"]), "limits"))
    return replace(reduce(_joined, parts), at=node.at)


def _policy(policy: Node) -> list[Node]:
    """Splits a policy into its settings and its tuning."""
    if policy.value in _TUNED:
        return [_under(policy, "tune")]
    if isinstance(policy.value, str):
        raise policy.error(f"unknown policy {shown(policy.value)}; expected {', '.join(_TUNED)} or a mapping")
    search = policy.entries.get("max_batch")
    if search is None:
        return [_under(policy, "policy")]
    if not isinstance(search.value, bool):
        raise search.error(f"policy.max_batch: expected true or false, got {shown(search.value)}")
    tune = replace(search, value="max_batch" if search.value else "none")
    return [_under(policy.without("max_batch"), "policy"), _under(tune, "tune")]


def _limits(limits: Node) -> Node:
    """Limits in bytes. `none` for all limits, or for a single limit, lifts what an earlier layer set."""
    if limits.value in (None, "none"):
        return replace(limits, value={f.name: replace(limits, value=None) for f in fields(HardwareLimits)})
    lifted = {key: replace(node, value=None) for key, node in limits.entries.items() if node.value == "none"}
    return _in_bytes(limits.updated(lifted))


def _in_bytes(section: Node) -> Node:
    """Converts the sizes of a mapping, such as 16GiB, to bytes."""
    sizes = section.only(*_SIZE_KEYS).entries
    return section.updated({key: _in_unit(node, parse_size) for key, node in sizes.items()})


def _in_unit(node: Node, parse: Callable[[str], float]) -> Node:
    """Parses a text value; leaves any other value to the later type check."""
    if not isinstance(node.value, str):
        return node
    try:
        return replace(node, value=parse(node.value))
    except HarnessError as exc:
        raise node.error(str(exc)) from None


def _under(node: Node, key: str) -> Node:
    """The mapping `{key: node}`, at the node's own position."""
    return Node({key: replace(node, key_at=node.key_at or node.at)}, node.at)


def _joined(first: Node, second: Node) -> Node:
    """Merges two parts of one layer. Raises HarnessError for a key in both: neither may silently win."""
    for key, node in second.entries.items():
        twin = first.entries.get(key)
        if twin is not None and isinstance(twin.value, dict) and isinstance(node.value, dict):
            _joined(twin, node)
        elif twin is not None:
            raise node.error(f"{key} is given twice in one place: here and at {twin.at}")
    return first.merged(second)
