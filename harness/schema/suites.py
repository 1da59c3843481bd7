"""The JSON Schema of suite files, for editors: types from the contracts, descriptions from keys.yaml."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from harness import api
from harness.suite.check import Header
from harness.suite.config import CELL_KEYS, SUITE_KEYS
from harness.suite.keys import Key, keys

_SECTIONS = {"model": api.ModelSpec, "workload": api.WorkloadSpec, "policy": api.OffloadPolicy,
             "limits": api.HardwareLimits, "requires": api.HardwareRequirements}  # fmt: skip
#: Fields whose keys in a suite have no unit in their names.
_DURATIONS = {"timeout_s": "timeout", "latency_s": "latency", "duration_s": "duration", "think_s": "think_time",
              "link_delay_s": "link_delay"}  # fmt: skip
#: Fields of limits and requirements that are no sizes.
_COUNTS_AND_NAMES = ("threads", "cores", "machine")
_QUANTITY = {"type": "string", "pattern": "^[0-9]+([.][0-9]+)? ?[A-Za-z]+$"}
_NONE = {"enum": ["none", None]}


def suite_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a suite file. It accepts whatever `harness validate` does, which refuses more."""
    definitions: dict[str, Any] = {}
    sections = {name: _section(name, kind, definitions) for name, kind in _SECTIONS.items()}
    sections["policy"] = {"anyOf": [sections["policy"], {"enum": ["max_batch", "search", "search_bits"]}]}
    sections["limits"] = {"anyOf": [sections["limits"], _NONE]}
    spec = _properties(api.RunSpec, definitions)
    cell = {name: _of_cell(name, spec) for name in CELL_KEYS}
    several = {name: {"anyOf": [cell[name], _list(cell[name])]} for name in ("model", "workload")}
    axes = {name: {"anyOf": [_list(schema), schema]} for name, schema in cell.items()}
    header = _properties(Header, definitions)
    suite = {name: cell.get(name) or header.get(name, {}) for name in SUITE_KEYS} | several | {
        "hardware": _object({"requires": _ref("requires"), "limits": _ref("limits")}),
        "matrix": {"anyOf": [_list(_ref("cell")), _object(axes)]},
    }  # fmt: skip
    told = keys()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": "made by `make schema`",
        "title": "A suite of offload-harness",
        **_object({n: _told((told["suite"].get(n) or told["cell"][n]), schema) for n, schema in suite.items()}),
        "required": ["name"],
        "$defs": sections
        | {"cell": _object({name: _told(told["cell"][name], schema) for name, schema in cell.items()})}
        | {name: _bare(schema) for name, schema in definitions.items() if name not in _types()},
    }


def _section(name: str, kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """A mapping of a cell. No key is required: a layer below may give it."""
    properties = {}
    for field, schema in _properties(kind, definitions).items():
        key = _DURATIONS.get(field, field)
        forms = [schema]
        if key != field or (name in ("limits", "requires") and field not in _COUNTS_AND_NAMES):
            forms.append(_QUANTITY)  # with its unit
        if name == "limits":
            forms = [*(schema.get("anyOf", forms) if len(forms) == 1 else forms), _NONE]  # lifted
        properties[key] = _told(keys()[name][key], forms[0] if len(forms) == 1 else {"anyOf": forms})
    if name == "policy":
        properties["max_batch"] = {"type": "boolean", "description": "Search the largest batch: short for `tune`."}
    return _object(properties)


def _of_cell(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    if name in _SECTIONS:
        return _ref(name)
    if name in ("schedule", "compute_dtype"):
        return _ref_into("policy", name)
    field = next((f for f, key in _DURATIONS.items() if key == name), name)
    schema: dict[str, Any] = spec[field]
    return {"anyOf": [schema, _QUANTITY]} if field != name else schema


def _ref_into(section: str, name: str) -> dict[str, Any]:
    schema: dict[str, Any] = _properties(_SECTIONS[section], {})[name]
    return schema


def _properties(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of each field, without titles and defaults; definitions that they refer to are added."""
    schema = TypeAdapter(kind).json_schema()
    definitions |= schema.get("$defs", {})
    return {name: _bare(found) for name, found in schema["properties"].items()}


def _bare(schema: Any) -> Any:
    """Without what is said elsewhere, and with our names of the sections."""
    if isinstance(schema, list):
        return [_bare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if (reference := schema.get("$ref")) and (section := _types().get(reference.rpartition("/")[2])):
        return _ref(section)
    kept = {k: v for k, v in schema.items() if k not in ("title", "default", "description")}
    return {k: {n: _bare(p) for n, p in v.items()} if k == "properties" else _bare(v) for k, v in kept.items()}


def _types() -> dict[str, str]:
    return {kind.__name__: name for name, kind in _SECTIONS.items()}


def _told(key: Key, schema: Mapping[str, Any]) -> dict[str, Any]:
    """A key's schema with its description, as editors show it."""
    parts = [key.means, *([f"Unit: {key.unit}."] if key.unit else [])]
    parts += [f"Default: {key.default}."] if key.default else []
    parts += [f"Engines: {', '.join(key.engines)}."] if key.engines else []
    return {"description": " ".join([*parts, f"Example: {key.example}"]), **schema}


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": dict(properties)}


def _list(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}
