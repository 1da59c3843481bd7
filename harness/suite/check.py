"""Validates merged suite data against the dataclasses of harness.api; every error names its position in the file."""

import functools
import json
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from harness import api, registry
from harness.common.env import ENV_PREFIXES, is_settable
from harness.common.files import SAFE_NAME
from harness.common.published import PublishedTable
from harness.common.units import MAX_SIZE
from harness.common.words import nearest
from harness.suite.cell_names import MAX_CELL_NAME, NAME_RULE
from harness.suite.check_workload import workload_problems
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
    "workload.rate": (1e-4, 1e5),
    "workload.cv": (0.1, 10),
    "workload.concurrency": (1, 100_000),
    "workload.duration_s": (0.001, 30 * 86400),
    "workload.rounds": (1, 1000),
    "workload.think_s": (0, 86400),
    "limits.threads": _COUNT,
    "limits.device_memory": (1, MAX_SIZE),
    "limits.host_memory": (1, MAX_SIZE),
    "limits.disk_bandwidth": (1, MAX_SIZE),
    "limits.link_rate": (100_000, 400_000_000_000),
    "limits.link_delay_s": (0, 10),
}
_HEADER_RANGES = {f"requires.{field.name}": (0, MAX_SIZE) for field in fields(api.HardwareRequirements)}

_FIELDS = {
    "model": api.ModelSpec,
    "workload": api.WorkloadSpec,
    "LengthSpec": api.LengthSpec,  # an arm of a union, as pydantic names it
    "slo": api.Slo,
    "stop_when": api.StopWhen,
    "policy": api.OffloadPolicy,
    "limits": api.HardwareLimits,
    "requires": api.HardwareRequirements,
    "hardware": api.HardwareProfile,
    "device": api.Processor,
    "host": api.Processor,
    "link": api.Link,
    "disk": api.Disk,
}
#: Fields whose keys in a suite have no unit in their names.
_DURATIONS = {"timeout_s": "timeout", "latency_s": "latency", "duration_s": "duration", "think_s": "think_time",
              "link_delay_s": "link_delay"}  # fmt: skip
#: Those that a cell has, the ones whose names are most often meant first.
_SECTIONS = ("limits", "policy", "workload", "model")
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
    predictions: bool = True
    reproduces: PublishedTable | None = None  # a paper's table; reports show its figures beside the suite's


_HEADER = TypeAdapter(Header)
_RUN_SPEC = TypeAdapter(api.RunSpec)
_HARDWARE = TypeAdapter(api.HardwareProfile)
_POLICY = TypeAdapter(api.OffloadPolicy)

#: The launchers whose ranks can be in network namespaces.
_LINKED = ("process", "venv")
#: What is wrong with other environment variables in a cell.
_OTHER_ENV = f"a cell can set variables that begin with {', '.join(ENV_PREFIXES)}"


def each(function: Callable[[S], T], arguments: Iterable[S]) -> list[T]:
    """Applies `function` to each argument. Raises one HarnessError with every distinct line of the errors it caught."""
    results, problems = [], dict[str, None]()
    for argument in arguments:
        try:
            results.append(function(argument))
        except api.HarnessError as exc:
            errors = str(exc).split("\n") if isinstance(exc, api.HarnessErrors) else [" ".join(str(exc).splitlines())]
            problems.update(dict.fromkeys(errors))
    raise_all(problems)
    return results


class Problems:
    """Collects what is wrong in a file, so that all of it is reported at once."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}

    def attempt(self, function: Callable[[], T]) -> T | None:
        """What `function` returns; None, with its errors collected, where it raises HarnessError."""
        try:
            return function()
        except api.HarnessError as exc:
            lines = str(exc).split("\n") if isinstance(exc, api.HarnessErrors) else [" ".join(str(exc).splitlines())]
            self._lines.update(dict.fromkeys(lines))
            return None

    def raise_all(self, most: int | None = None) -> None:
        """Raises HarnessError with a line per problem in the order of the file, and no more than `most` lines.

        Keys that are missing only because they are misspelt are left out.
        """
        meant = set(re.findall(r"did you mean ('[^']*')\?", "\n".join(self._lines)))
        lines = [line for line in self._lines if not any(f"missing key {key} in" in line for key in meant)]
        lines.sort(key=_position)
        if most is not None and len(lines) > most:
            lines[most:] = [f"... and {len(lines) - most} more"]
        raise_all(lines)


def _position(problem: str) -> tuple[int, int]:
    """The line and column that a problem begins with; (0, 0) for one of a --set option."""
    found = re.match(r"[^ ]*?:(\d+):(\d+): ", problem)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def raise_all(problems: Collection[str]) -> None:
    """Raises HarnessError with one line per problem; does nothing for no problems."""
    if problems:
        raise api.HarnessErrors("\n".join(problems))


def refuse_unknown(node: Node, known: Collection[str], where: str) -> None:
    """Raises HarnessError for the keys of a mapping that are not in `known`, each with the nearest known key."""
    raise_all([unknown_key(node.entries[key], key, known, where) for key in node.entries if key not in known])


def unknown_key(node: Node, key: str, known: Collection[str], where: str) -> str:
    """The error line for one unknown key, with the position of the key."""
    inside = dotted_key(key, _SECTIONS) if where in ("cell", "suite") else ""
    hint = nearest(key, known, inside)
    return f"{node.key_at}: unknown key {shown(key)} in {where}; {hint}"


def dotted_key(key: str, sections: Collection[str]) -> str:
    """`did you mean 'limits.host_memory'?` for a key that stands inside one of the sections; empty if none does."""
    inside = [
        (section, _DURATIONS.get(f.name, f.name))
        for section in sections
        if section in _FIELDS
        for f in fields(_FIELDS[section])
    ]
    near = [f"{s}.{name}" for s, name in inside if name == key] or [
        f"{s}.{name}" for s, name in inside if min(len(key), len(name)) > 2 and (key in name or name in key)
    ]
    near.sort(key=lambda path: path != "limits.host_memory")  # which is what most mean by memory
    return f"did you mean {near[0]!r}?" if near else ""


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
    """The cell in `node`, before its suite and final name are set. Raises HarnessError with a line for each problem.

    Where values have wrong types, the others are checked as if these were left out.
    """
    problems = Problems()
    spec = problems.attempt(lambda: _typed(_RUN_SPEC, node, "cell"))
    checked, left_out = (node, []) if spec else _well_typed(node)
    if spec is None and checked is not None:
        spec = Problems().attempt(lambda: _typed(_RUN_SPEC, checked, "cell"))
    if spec is not None and checked is not None:
        _check_values(spec, checked, left_out, problems)
    problems.raise_all()
    assert spec is not None
    return spec


def _check_values(spec: api.RunSpec, node: Node, left_out: Collection[str], problems: Problems) -> None:
    """Collects what is wrong with a cell's values. A section of which something is `left_out` is not checked as one."""
    problems.attempt(lambda: raise_all(_out_of_range(spec, node, _CELL_RANGES)))
    if "policy" not in left_out:
        problems.attempt(lambda: _check_policy(spec, node))
    together = [(path, text) for path, text in _problems(spec, node) if text and path.split(".")[0] not in left_out]
    problems.attempt(lambda: raise_all([f"{node.find(path.split('.')).at}: {text}" for path, text in together]))
    if "name" in node.entries and "name" not in left_out:
        problems.attempt(lambda: _require_name(spec.name, node, MAX_CELL_NAME))


def _check_policy(spec: api.RunSpec, node: Node) -> None:
    try:
        spec.policy.validate()
    except api.HarnessError as exc:
        field = re.search(r"(?<=policy\.)\w+", str(exc))
        raise node.find(("policy", field[0] if field else "")).error(str(exc)) from None


def _well_typed(node: Node) -> tuple[Node | None, list[str]]:
    """A cell without its values of wrong types and its unknown keys, and the sections that lost some; None for one
    that lacks a key."""
    try:
        _RUN_SPEC.validate_json(json.dumps(node.plain()), strict=True)
    except ValidationError as exc:
        wrong = [error["loc"] for error in exc.errors(include_url=False, include_input=False)]
        if any(len(node.trace(path)) == 1 for path in wrong):
            return None, []
        for path in wrong:
            node = node.without_path(path)
        return node, [str(path[0]) for path in wrong]
    return node, []


def _problems(spec: api.RunSpec, node: Node) -> Iterator[tuple[str, str]]:
    """Names in a cell that are unknown or clash, and settings that do not go together: the path of each, and why."""
    if spec.engine not in (engines := registry.engines()):
        yield "engine", f"unknown engine {shown(spec.engine)}; {nearest(spec.engine, engines)}"
    if spec.launcher not in (launchers := registry.launchers()):
        yield "launcher", f"unknown launcher {shown(spec.launcher)}; {nearest(spec.launcher, launchers)}"
    yield "engine", registry.clash("engine", spec.engine)
    yield "launcher", registry.clash("launcher", spec.launcher)
    yield from workload_problems(spec, node)
    if spec.latency_s is not None and not spec.tune.startswith("search"):
        yield "latency_s", "latency goes with `policy: search` or `search_bits`: only a search can keep to a latency"
    for path, values in spec.candidates.items():
        yield "candidates", _candidate_problem(spec, path, values)
    yield from ((f"env.{name}", f"env.{name}: {_OTHER_ENV}") for name in spec.env if not is_settable(name))
    yield from _link_problems(spec)
    if spec.image and spec.launcher != "docker":
        yield "image", "image goes with `launcher: docker`: other launchers use no image"
    if spec.environment and spec.launcher != "venv":
        yield "environment", "environment goes with `launcher: venv`: other launchers use no environment"
    elif spec.environment and spec.environment not in (known := registry.environments()):
        yield "environment", f"unknown environment {shown(spec.environment)}; {nearest(spec.environment, known)}"
    yield "model.id", _model_problem(spec)


def _link_problems(spec: api.RunSpec) -> Iterator[tuple[str, str]]:
    """Where and why the links that a cell asks for cannot be; empty where they can."""
    if spec.limits.link is None:
        return
    field = "link_delay_s" if spec.limits.link_rate is None else "link_rate"
    path, keys = f"limits.{field}", "limits.link_rate and link_delay go with"
    if spec.policy.ranks == 1:
        yield path, f"{keys} `policy.pipeline` or `tensor` of 2 or more: one rank has nobody to send to"
    if spec.launcher not in _LINKED:
        yield path, f"{keys} `launcher: {' or '.join(_LINKED)}`: others make no links between ranks"


def _model_problem(spec: api.RunSpec) -> str:
    """Why there can be no such model; empty where there may be one."""
    if not spec.model.id:
        return "model.id is empty"
    entry = registry.engines().get(spec.engine)
    made = spec.model.weights == "dummy" and entry is not None and not entry.builtin_model
    return _unknown_shape(spec.model.id) if made else ""


@functools.cache
def _unknown_shape(model: str) -> str:
    """Why there are no dummy weights of a model; empty where there are."""
    shapes = registry.shapes().CATALOGUE
    if model in shapes:
        return ""
    hint = nearest(model, shapes, "`harness ls models` lists them")
    return f"model.id: `weights: dummy` has no shape {shown(model)}; {hint}"


def _candidate_problem(spec: api.RunSpec, path: str, values: tuple[object, ...]) -> str:
    """Why `values` cannot be tried for the setting `path`; empty where they can."""
    section, _, name = path.partition(".")
    settings = [f.name for f in fields(api.OffloadPolicy) if spec.tune == "none" or f.name != "gpu_batch_size"]
    problem = ""
    if spec.tune.startswith("search"):
        problem = "`policy: search` chooses by a plan; candidates go with a given policy or `max_batch`"
    elif section not in ("options", "policy", "env") or not name:
        problem = "expected options.NAME, policy.FIELD or env.NAME"
    elif section == "env" and not is_settable(name):
        problem = _OTHER_ENV
    elif (section == "env" and api.is_secret(name)) or (section == "options" and _is_secret(name, values)):
        problem = f"it may hold a secret, which records do not keep: set it in `{section}`"
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


def _is_secret(name: str, values: tuple[object, ...]) -> bool:
    return any(api.is_secret_option(name, value) for value in values)


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
            known = [_DURATIONS.get(field.name, field.name) for field in fields(_FIELDS[section])]
            named = "workload.lengths" if section == "LengthSpec" else section
            problems.append(unknown_key(nodes[-1], str(location[-1]), known, named))
        elif kind == "missing" and isinstance(location[-1], str):
            problems.append(f"{nodes[-1].at}: missing key {location[-1]!r} in {path or where}")
        else:
            listed = kind == "tuple_type" and location[0] == "candidates"
            option = "a list" if listed else _EXPECTED.get(kind) or error.get("ctx", {}).get("expected") or error["msg"]
            mismatches.setdefault(path, (nodes[-1], []))[1].append(option)
    for path, (value, options) in mismatches.items():
        expected = " or ".join(dict.fromkeys(options))
        hidden = (path.startswith("env.") and api.is_secret(path)) or api.is_secret_option(path, "")
        problems.append(f"{value.at}: {path}: expected {expected}, got {api.HIDDEN if hidden else shown(value.value)}")
    raise api.HarnessErrors("\n".join(problems))


def _dotted(path: Iterable[int | str]) -> str:
    """A dotted path with the keys of a suite file, which write durations without their unit."""
    text = ".".join(str(part) for part in path)
    for field_name, key in _DURATIONS.items():
        text = text.replace(field_name, key)
    return text
