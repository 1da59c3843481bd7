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

from harness.api import (
    HIDDEN,
    HardwareLimits,
    HarnessError,
    RunSpec,
    SuiteSpec,
    Tune,
    is_secret,
    is_secret_option,
    without_logins,
)
from harness.common.units import parse_duration, parse_rate, parse_size
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
_WORKLOAD_DURATIONS = {"duration": "duration_s", "think_time": "think_s"}
_LIMIT_DURATIONS = {"link_delay": "link_delay_s"}
_DEFAULTS = (
    *("engine", "options", "env", "model", "workload", "policy", *_POLICY_SHORTHANDS, "tune", "candidates"),
    *("repeats", "warmup", "seed", *_DURATIONS, "expect", "reference", "launcher", "image", "environment"),
)
_SIZE_KEYS = ("device_memory", "host_memory", "disk_free", "disk_bandwidth")
CELL_KEYS = ("name", "limits", *_DEFAULTS)
SUITE_KEYS = ("name", "description", "reproduces", "hardware", "machine_probe", "predictions", "matrix", *_DEFAULTS)


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
    problems = suite_check.Problems()
    problems.attempt(lambda: suite_check.refuse_unknown(root, SUITE_KEYS, "suite"))
    hardware = root.entries.get("hardware", Node({}, root.at))
    if not isinstance(hardware.value, dict):
        raise hardware.error(f"hardware: expected a mapping, got {shown(hardware.value)}")
    problems.attempt(lambda: suite_check.refuse_unknown(hardware, ("requires", "limits"), "hardware"))

    header = problems.attempt(lambda: suite_check.header(_header(root, hardware)))
    base = replace(root.only(*_DEFAULTS).merged(hardware.only("limits")), at=root.at)
    overridden = problems.attempt(lambda: suite_check.each(_override, overrides))
    cells = problems.attempt(lambda: _expand(base, root.only("matrix"), overridden or [], problems))
    problems.raise_all(suite_check.MAX_ERRORS)
    assert header is not None
    assert cells is not None
    launches = sum(cell.spec.repeats for cell in cells)
    if launches > MAX_LAUNCHES:
        raise root.error(f"{len(cells):,} cells make {launches:,} launches; at most {MAX_LAUNCHES:,} are allowed")
    specs = tuple(replace(spec, suite=header.name) for spec in name_cells(cells))
    twins = None if overrides else find_twins(specs)  # --set may make twins of cells that are not all selected
    if twins:
        raise root.error(f"cells {twins[0]!r} and {twins[1]!r} measure the same; leave one out or change its seed")
    return SuiteSpec(header.name, header.description, specs, header.requires, header.machine_probe, header.predictions)


def load_cell(settings: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunSpec:
    """One cell from `settings`, written as in a suite, under `overrides`. Raises HarnessError as `load_suite` does."""
    try:
        text = json.dumps(settings, ensure_ascii=False)
    except (TypeError, ValueError) as exc:  # of Python's API
        raise HarnessError(f"settings: expected texts, numbers, lists and mappings as in a suite: {exc}") from None
    cell = _layer(yaml_source.parse(text, "settings", positions=False))
    return suite_check.run_spec(reduce(_apply, suite_check.each(_override, overrides), cell))


def without_secret(override: str) -> str:
    """A --set option as errors and records show it: `***` for variables and options that may be secrets."""
    key, equals, value = override.partition("=")
    section, _, name = key.partition(".")
    secret = section in ("env", "candidates") and is_secret(name or override)
    number = value.replace(".", "", 1).isdecimal()
    secret |= section in ("options", "candidates") and is_secret_option(name or value, 0 if number else value)
    return f"{key}={HIDDEN}" if equals and secret else without_logins(override)


def _header(root: Node, hardware: Node) -> Node:
    entries = root.only("name", "description", "machine_probe", "predictions", "reproduces").entries
    if "requires" in hardware.entries:
        entries["requires"] = _in_bytes(hardware.entries["requires"])
    return Node(entries, root.at)


def _expand(
    base: Node, suite: Node, overrides: Sequence[_Override], problems: suite_check.Problems
) -> list[Cell]:  # fmt: skip
    """All cells, checked. The product of the axes is counted before any cell is built. Keys that are wrong by
    themselves become `problems`, and the cells are checked without them."""
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
    for layers in itertools.product(*([_right_part(node, problems) for node in axis] for axis in axes)):
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
    told = without_secret(text)
    label = f"--set {told}" if len(told) <= 100 and told.isprintable() else f"--set {shown(told)}"
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
    parts = [node.without("policy", *_DURATIONS, "limits", "workload", *_POLICY_SHORTHANDS)]
    parts += [_under(node.only(key), "policy") for key in _POLICY_SHORTHANDS if key in node.entries]
    if "policy" in node.entries:
        parts += _policy(node.entries["policy"])
    for key in _DURATIONS:
        if key in node.entries:
            parts.append(_under(_in_unit(node.entries[key], parse_duration), f"{key}_s"))
    if "workload" in node.entries:
        workload = _in_seconds(node.entries["workload"], "workload", _WORKLOAD_DURATIONS)
        parts.append(_under(workload, "workload"))
    if "limits" in node.entries:
        parts.append(_under(_limits(node.entries["limits"]), "limits"))
    return replace(reduce(_joined, parts), at=node.at)


def _right_part(node: Node, problems: suite_check.Problems) -> Node:
    """The layer of a mapping of cell keys, without those that are wrong, which become `problems`."""
    try:
        return _layer(node)
    except HarnessError:
        parts = [part for part in _entries(node) if problems.attempt(partial(_layer, part)) is not None]
    problems.attempt(lambda: _layer(reduce(Node.merged, parts, Node({}, node.at))))
    return replace(reduce(Node.merged, map(_layer, parts), Node({}, node.at)), at=node.at)


def _entries(node: Node) -> list[Node]:
    """A mapping of cell keys as mappings of one entry, its limits each by itself; what is no mapping, as it is."""
    parts = []
    for key, child in node.entries.items():
        values = [Node({name: child.entries[name]}, child.at, child.key_at) for name in child.entries]
        parts += [Node({key: value}, node.at) for value in (values if key == "limits" and values else [child])]
    return parts or [node]


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


def _in_seconds(section: Node, name: str, durations: Mapping[str, str]) -> Node:
    """A mapping called `name` with its `durations`, fields by key, in seconds."""
    if not isinstance(section.value, dict):
        return section
    entries = {}
    for key, node in section.entries.items():
        if key in durations.values():
            raise HarnessError(suite_check.unknown_key(node, key, tuple(durations), name))
        entries[durations.get(key, key)] = _in_unit(node, parse_duration) if key in durations else node
    return replace(section, value=entries)


def _limits(limits: Node) -> Node:
    """Limits in bytes, bits per second and seconds. `none` for all limits, or for a single limit, lifts what an earlier
    layer set."""
    if limits.value in (None, "none"):
        return replace(limits, value={f.name: replace(limits, value=None) for f in fields(HardwareLimits)})
    lifted = {key: replace(node, value=None) for key, node in limits.entries.items() if node.value == "none"}
    limits = _in_bytes(limits.updated(lifted))
    rates = {key: _in_unit(node, parse_rate) for key, node in limits.only("link_rate").entries.items()}
    return _in_seconds(limits.updated(rates), "limits", _LIMIT_DURATIONS)


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
