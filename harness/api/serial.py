"""Contract objects to JSON and back, strictly."""

import builtins
import collections.abc
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from harness.api.common import HarnessError

T = TypeVar("T")
#: From JSON data and the place to name in errors.
Converter = Callable[[Any, str], Any]


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
    hint: Any = cls
    return cast(T, _converter(hint)(data, cls.__name__))


@functools.cache
def _converter(hint: Any) -> Converter:
    """What makes a value of type `hint` of JSON data, and takes the place to name in errors. Made once for each type:
    records have thousands of objects."""
    if dataclasses.is_dataclass(hint):
        return _object(hint)
    match typing.get_origin(hint):
        case typing.Union | types.UnionType:
            return _union(typing.get_args(hint))
        case typing.Literal:
            return _literal(typing.get_args(hint))
        case builtins.tuple:
            return _tuple(typing.get_args(hint))
        case collections.abc.Mapping:
            return _mapping(typing.get_args(hint)[1])
    return _scalar(hint)


def _object(cls: Any) -> Converter:
    hints, fields = typing.get_type_hints(cls), dataclasses.fields(cls)
    missing = dataclasses.MISSING
    required = [f.name for f in fields if f.default is missing and f.default_factory is missing]
    converters = {f.name: _converter(hints[f.name]) for f in fields}

    def convert(data: Any, where: str) -> Any:
        _require(Mapping, data, where)
        if unknown := sorted(data.keys() - converters.keys()):
            raise HarnessError(f"{where}: unknown field {unknown[0]!r:.60}")
        for name in required:
            if name not in data:
                raise HarnessError(f"{where}: field {name!r} is missing")
        return cls(**{k: converters[k](v, f"{where}.{k}") for k, v in data.items()})

    return convert


def _union(arms: tuple[Any, ...]) -> Converter:
    optional = type(None) in arms
    converters = [_converter(arm) for arm in arms if arm is not type(None)]

    def convert(data: Any, where: str) -> Any:
        if data is None and optional:
            return None
        complaints = []
        for converter in converters:
            try:
                return converter(data, where)
            except HarnessError as exc:
                complaints.append(str(exc))
        raise HarnessError("; or ".join(complaints))

    return convert


def _literal(allowed: tuple[Any, ...]) -> Converter:
    kinds = {type(a) for a in allowed}

    def convert(data: Any, where: str) -> Any:
        if data in allowed and type(data) in kinds:  # JSON true is not 1
            return data
        raise HarnessError(f"{where}: {data!r:.60} is not one of {', '.join(map(str, allowed))}")

    return convert


def _tuple(items: tuple[Any, ...]) -> Converter:
    of_any_length = items[-1] is Ellipsis
    converters = [_converter(item) for item in items if item is not Ellipsis]

    def convert(data: Any, where: str) -> Any:
        _require((list, tuple), data, where)
        if of_any_length:
            one = converters[0]
            return tuple([one(v, where) for v in data])
        if len(converters) != len(data):
            raise HarnessError(f"{where}: expected {len(converters)} values, got {len(data)}")
        return tuple(c(v, f"{where}[{i}]") for i, (c, v) in enumerate(zip(converters, data, strict=True)))

    return convert


def _mapping(values: Any) -> Converter:
    one = _converter(values)

    def convert(data: Any, where: str) -> Any:
        _require(Mapping, data, where)
        return {k: one(v, f"{where}.{k:.60}") for k, v in data.items()}

    return convert


def _scalar(hint: Any) -> Converter:
    if hint is Any:
        return lambda data, where: data
    if hint is float:
        return _number
    if hint is Path:
        return _path

    def convert(data: Any, where: str) -> Any:
        _require(hint, data, where)
        if isinstance(data, bool) and hint is not bool:
            raise HarnessError(f"{where}: expected {hint.__name__}, got {data!r:.60}")
        return data

    return convert


def _number(data: Any, where: str) -> Any:
    if type(data) in (int, float):
        return float(data)
    raise HarnessError(f"{where}: expected a number, got {data!r:.60}")


def _path(data: Any, where: str) -> Any:
    _require(str, data, where)
    return Path(data)


def _require(kind: Any, data: Any, where: str) -> None:
    if not isinstance(data, kind):
        names = "a list" if kind == (list, tuple) else "an object" if kind is Mapping else kind.__name__
        raise HarnessError(f"{where}: expected {names}, got {data!r:.60}")
