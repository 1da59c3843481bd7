"""Validates merged suite data against the dataclasses of harness.api; every error names its position in the file."""

import json
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from harness import api, registry
from harness.common.env import ENV_PREFIXES
from harness.common.published import PublishedTable
from harness.common.units import MAX_SIZE
from harness.common.words import nearest
from harness.suite.cell_names import MAX_CELL_NAME, NAME_RULE, SAFE_NAME
from harness.suite.yaml_node import Node, shown

MAX_ERRORS = 20
MAX_SUITE_NAME = 64

S = TypeVar("S")
T = TypeVar("T")

_COUNT = (1, (1 << 31) - 1)
_CELL_RANGES = {
    "repeats": (1, 1000),
    "warmup": (0, 100),
    "seed": (0, (1 << 32) - 1),
    "timeout_s": (0.001, 30 * 86400),
    "latency_s": (0.001, 30 * 86400),
    "workload.prompt_len": _COUNT,
    "workload.gen_len": _COUNT,
    "workload.num_requests": (1, 1_000_000),
    "limits.threads": _COUNT,
    "limits.device_memory": (1, MAX_SIZE),
    "limits.host_memory": (1, MAX_SIZE),
    "limits.disk_bandwidth": (1, MAX_SIZE),
}
_HEADER_RANGES = {f"requires.{field.name}": (0, MAX_SIZE) for field in fields(api.HardwareRequirements)}

_FIELDS = {
    "model": api.ModelSpec,
    "workload": api.WorkloadSpec,
    "policy": api.OffloadPolicy,
    "limits": api.HardwareLimits,
    "requires": api.HardwareRequirements,
    "hardware": api.HardwareProfile,
    "device": api.Processor,
    "host": api.Processor,
    "link": api.Link,
    "disk": api.Disk,
}
_FRACTIONS = "three fractions (device, host, disk)"
_EXPECTED = {  # by pydantic's error type
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": _FRACTIONS,
    "too_long": _FRACTIONS,
    "missing": _FRACTIONS,
}


@dataclass(frozen=True)
class Header:
    """The keys of a suite file outside its cells."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - pydantic's own name, as in harness.api

    name: str
    description: str = ""
    requires: api.HardwareRequirements = field(default_factory=api.HardwareRequirements)
    machine_probe: bool = True
    reproduces: PublishedTable | None = None  # a paper's table; reports show its figures beside the suite's


_HEADER = TypeAdapter(Header)
_RUN_SPEC = TypeAdapter(api.RunSpec)
_HARDWARE = TypeAdapter(api.HardwareProfile)
_POLICY = TypeAdapter(api.OffloadPolicy)

#: What is wrong with other environment variables in a cell.
_OTHER_ENV = f"a cell can set variables that begin with {', '.join(ENV_PREFIXES)}"


def each(function: Callable[[S], T], arguments: Iterable[S]) -> list[T]:
    """Applies `function` to each argument. Raises one HarnessError with every distinct line of the errors it caught."""
    results, problems = [], dict[str, None]()
    for argument in arguments:
        try:
            results.append(function(argument))
        except api.HarnessError as exc:
            problems.update(dict.fromkeys(str(exc).splitlines()))
    raise_all(problems)
    return results


def raise_all(problems: Collection[str]) -> None:
    """Raises HarnessError with one line per problem; does nothing for no problems."""
    if not problems:
        return
    lines = list(problems)[:MAX_ERRORS]
    if more := len(problems) - len(lines):
        lines.append(f"... and {more} more")
    raise api.HarnessError("\n".join(lines))


def refuse_unknown(node: Node, known: Collection[str], where: str) -> None:
    """Raises HarnessError for the keys of a mapping that are not in `known`, each with the nearest known key."""
    raise_all([unknown_key(node.entries[key], key, known, where) for key in node.entries if key not in known])


def unknown_key(node: Node, key: str, known: Collection[str], where: str) -> str:
    """The error line for one unknown key, with the position of the key."""
    return f"{node.key_at}: unknown key {shown(key)} in {where}; {nearest(key, known)}"


def header(node: Node) -> Header:
    """The header in `node`. Raises HarnessError with a line for each problem."""
    checked = _typed(_HEADER, node, "suite")
    raise_all(_out_of_range(checked, node, _HEADER_RANGES))
    _require_name(checked.name, node, MAX_SUITE_NAME)
    return checked


def hardware(node: Node) -> api.HardwareProfile:
    """The profile in `node`, without a range check of its figures. Raises HarnessError with a line for each problem."""
    if not isinstance(node.value, dict):
        raise node.error(f"a hardware profile is a mapping of keys, got {shown(node.value)}")
    return _typed(_HARDWARE, node, "hardware")


def policy(node: Node) -> api.OffloadPolicy:
    """The policy in `node`. Raises HarnessError with a line for each problem."""
    checked = _typed(_POLICY, node, "policy")
    checked.validate()
    return checked


def run_spec(node: Node) -> api.RunSpec:
    """The cell in `node`, before its suite and final name are set. Raises HarnessError with a line for each problem."""
    spec = _typed(_RUN_SPEC, node, "cell")
    raise_all(_out_of_range(spec, node, _CELL_RANGES))
    try:
        spec.policy.validate()
    except api.HarnessError as exc:
        field = re.search(r"(?<=policy\.)\w+", str(exc))
        raise node.find(("policy", field[0] if field else "")).error(str(exc)) from None
    raise_all([f"{node.find(path.split('.')).at}: {problem}" for path, problem in _problems(spec, node) if problem])
    if "name" in node.entries:
        _require_name(spec.name, node, MAX_CELL_NAME)
    return spec


def _problems(spec: api.RunSpec, node: Node) -> Iterator[tuple[str, str]]:
    """Names in a cell that are unknown or clash, and settings that do not go together: the path of each, and why."""
    if spec.engine not in (engines := registry.engines()):
        yield "engine", f"unknown engine {shown(spec.engine)}; {nearest(spec.engine, engines)}"
    if spec.launcher not in (launchers := registry.launchers()):
        yield "launcher", f"unknown launcher {shown(spec.launcher)}; {nearest(spec.launcher, launchers)}"
    workload, searched = spec.workload, spec.tune.startswith("search")
    if workload.task and not registry.is_task(workload.task):
        yield "workload.task", f"unknown task {shown(workload.task)}; {nearest(workload.task, registry.task_names())}"
    yield "engine", registry.clash("engine", spec.engine)
    yield "launcher", registry.clash("launcher", spec.launcher)
    yield "workload.task", registry.clash("task", workload.task)
    if spec.latency_s is not None and not searched:
        yield "latency_s", "latency goes with `policy: search` or `search_bits`: only a search can keep to a latency"
    if (workload.kind == "trace") != bool(workload.trace):
        yield "workload.trace", "workload.trace goes with `kind: trace`: set both, or neither"
    if (workload.kind == "task") != bool(workload.task):
        yield "workload.task", "workload.task goes with `kind: task`: set both, or neither"
    for path, values in spec.candidates.items():
        yield "candidates", _candidate_problem(spec, path, values)
    if workload.task and searched:
        yield "policy", "policy: a search needs prompt and output lengths, and a task sets none; give a policy"
    if workload.task:
        for key in node.find(("workload",)).only("prompt_len", "gen_len").entries:
            yield f"workload.{key}", f"workload.{key}: the examples of a task have their own lengths"
    yield from ((f"env.{name}", f"env.{name}: {_OTHER_ENV}") for name in spec.env if not name.startswith(ENV_PREFIXES))
    if spec.image and spec.launcher != "docker":
        yield "image", "image goes with `launcher: docker`: other launchers use no image"
    if not spec.model.id:
        yield "model.id", "model.id is empty"


def _candidate_problem(spec: api.RunSpec, path: str, values: tuple[object, ...]) -> str:
    """Why `values` cannot be tried for the setting `path`; empty where they can."""
    section, _, name = path.partition(".")
    settings = [f.name for f in fields(api.OffloadPolicy) if spec.tune == "none" or f.name != "gpu_batch_size"]
    problem = ""
    if spec.tune.startswith("search"):
        problem = "`policy: search` chooses by a plan; candidates go with a given policy or `max_batch`"
    elif section not in ("options", "policy", "env") or not name:
        problem = "expected options.NAME, policy.FIELD or env.NAME"
    elif section == "env" and not name.startswith(ENV_PREFIXES):
        problem = _OTHER_ENV
    elif section == "env" and not all(isinstance(value, str) for value in values):
        problem = "values of environment variables are texts, in quotes where they look like numbers"
    elif section == "policy" and name not in settings:
        problem = f"no such setting to try; {nearest(name, settings)}"
    elif not values:
        problem = "the list is empty"
    for value in () if problem else values:
        try:
            if section == "policy":
                _POLICY.validate_json(json.dumps({name: value}), strict=True)
            spec.with_settings({path: value}).policy.validate()
        except ValidationError:
            problem = f"{shown(value)} is no value of it"
        except api.HarnessError as exc:
            problem = str(exc)
    return f"candidates.{path}: {problem}" if problem else ""


def _require_name(name: str, node: Node, longest: int) -> None:
    if not SAFE_NAME.fullmatch(name) or len(name) > longest:
        raise node.find(("name",)).error(f"name {shown(name)} must be at most {longest} {NAME_RULE}")


def _out_of_range(checked: Any, node: Node, ranges: Mapping[str, tuple[float, float]]) -> list[str]:
    problems = []
    for path, (low, high) in ranges.items():
        value = operator.attrgetter(path)(checked)
        if isinstance(value, int | float) and not low <= value <= high:
            at = node.find(path.split(".")).at
            problems.append(f"{at}: {_dotted([path])} is {value}; it must lie between {low:,} and {high:,}")
    return problems


def _typed(adapter: TypeAdapter[T], node: Node, where: str) -> T:
    """Validates by strict JSON rules: no number from text, no integer from a boolean or a fraction, no unknown key."""
    try:
        return adapter.validate_json(json.dumps(node.plain()), strict=True)
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_input=False)
    problems: list[str] = []
    mismatches: dict[str, tuple[Node, list[str]]] = {}  # pydantic reports one error per arm of a union
    for error in errors:
        location, kind = error["loc"], error["type"]
        nodes = node.trace(location)
        path = _dotted(location[: len(nodes) - 1])
        if kind == "unexpected_keyword_argument":
            section = str(location[-2]) if len(location) > 1 else where
            known = [field.name for field in fields(_FIELDS[section])]
            problems.append(unknown_key(nodes[-1], str(location[-1]), known, section))
        elif kind == "missing" and isinstance(location[-1], str):
            problems.append(f"{nodes[-1].at}: missing key {location[-1]!r} in {path or where}")
        else:
            listed = kind == "tuple_type" and location[0] == "candidates"
            option = "a list" if listed else _EXPECTED.get(kind) or error.get("ctx", {}).get("expected") or error["msg"]
            mismatches.setdefault(path, (nodes[-1], []))[1].append(option)
    for path, (value, options) in mismatches.items():
        expected = " or ".join(dict.fromkeys(options))
        problems.append(f"{value.at}: {path}: expected {expected}, got {shown(value.value)}")
    raise api.HarnessError("\n".join(problems))


def _dotted(path: Iterable[int | str]) -> str:
    """A dotted path with the keys of a suite file, which write durations without their unit."""
    return ".".join(str(part) for part in path).replace("timeout_s", "timeout").replace("latency_s", "latency")
