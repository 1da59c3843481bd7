"""Contract objects to JSON and back, strictly."""

from __future__ import annotations

import builtins
import collections.abc
import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from harness.api.common import HarnessError

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Plain JSON data of a contract object: dataclasses become objects in field order, tuples lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value


def from_json(cls: type[T], data: Any) -> T:
    """The inverse of `to_json` for a contract class: absent fields take their defaults.

    Raises HarnessError for a value that does not fit, naming the class and field. Unknown keys are
    refused: a reader must not drop what it does not understand.
    """
    return cast(T, _convert(cls, data, cls.__name__))


def _convert(hint: Any, data: Any, where: str) -> Any:
    """`data` as a value of type `hint`; `where` names it in errors."""
    if dataclasses.is_dataclass(hint):
        return _object(hint, data, where)
    match typing.get_origin(hint):
        case typing.Union | types.UnionType:
            return _union(typing.get_args(hint), data, where)
        case typing.Literal:
            allowed = typing.get_args(hint)
            if data in allowed and type(data) in {type(a) for a in allowed}:  # JSON true is not 1
                return data
            raise HarnessError(f"{where}: {data!r} is not one of {', '.join(map(str, allowed))}")
        case builtins.tuple:
            return _tuple(typing.get_args(hint), data, where)
        case collections.abc.Mapping:
            _require(Mapping, data, where)
            values = typing.get_args(hint)[1]
            return {k: _convert(values, v, f"{where}.{k}") for k, v in data.items()}
    return _scalar(hint, data, where)


def _object(cls: Any, data: Any, where: str) -> Any:
    _require(Mapping, data, where)
    hints, required = _fields(cls)
    if unknown := sorted(data.keys() - hints.keys()):
        raise HarnessError(f"{where}: unknown field {unknown[0]!r}")
    if missing := [name for name in required if name not in data]:
        raise HarnessError(f"{where}: field {missing[0]!r} is missing")
    return cls(**{k: _convert(hints[k], v, f"{where}.{k}") for k, v in data.items()})


@functools.cache
def _fields(cls: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Types by field, and the fields without a default; kept, as records have thousands of objects."""
    fields, hints = dataclasses.fields(cls), typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    required = tuple(f.name for f in fields if f.default is missing and f.default_factory is missing)
    return {f.name: hints[f.name] for f in fields}, required


def _union(arms: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in arms:
        return None
    complaints = []
    for arm in arms:
        if arm is not type(None):
            try:
                return _convert(arm, data, where)
            except HarnessError as exc:
                complaints.append(str(exc))
    raise HarnessError("; or ".join(complaints))


def _tuple(items: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _require((list, tuple), data, where)
    hints = [items[0]] * len(data) if items[-1] is Ellipsis else list(items)
    if len(hints) != len(data):
        raise HarnessError(f"{where}: expected {len(hints)} values, got {len(data)}")
    return tuple(_convert(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(zip(hints, data, strict=True)))


def _scalar(hint: Any, data: Any, where: str) -> Any:
    if hint is Any or data is hint is None:
        return data
    if hint is float and type(data) in (int, float):
        return float(data)
    if hint is not float:
        _require(hint, data, where)
        if isinstance(data, bool) and hint is not bool:
            raise HarnessError(f"{where}: expected {hint.__name__}, got {data!r}")
        return data
    raise HarnessError(f"{where}: expected a number, got {data!r}")


def _require(kind: Any, data: Any, where: str) -> None:
    if not isinstance(data, kind):
        names = "a list" if kind == (list, tuple) else "an object" if kind is Mapping else kind.__name__
        raise HarnessError(f"{where}: expected {names}, got {data!r:.60}")
