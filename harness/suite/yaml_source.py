"""Reads untrusted YAML into nodes with source positions, within fixed bounds.

PyYAML's safe loader drops positions, accepts duplicate keys and expands aliases without limit. This composer works
on the same event stream, keeps positions, rejects duplicate keys and bounds the expansion.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import yaml

from harness.api import HarnessError
from harness.common.regular_file import open_regular
from harness.suite.yaml_node import TEXT_UNIT, Node, shown

MAX_BYTES = 1 << 20
MAX_NODES = 50_000  # counted after aliases are expanded; a long text counts once more per TEXT_UNIT characters
MAX_DEPTH = 64
MAX_KEY = 128

_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
#: Characters that no suite may have.
UNSAFE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml where PyYAML was built with it


def read(path: Path) -> Node:
    """Parses the single document of a YAML file. Raises HarnessError with file, line and column for all it rejects."""
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise HarnessError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise HarnessError(f"{path}: is a folder; give a suite file") from None
    except (OSError, ValueError) as exc:
        raise HarnessError(f"{str(path)!r}: cannot be read: {getattr(exc, 'strerror', None) or exc}") from None
    if len(data) > MAX_BYTES:
        raise HarnessError(f"{path}: is larger than {MAX_BYTES >> 20} MiB, too large for a suite")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise HarnessError(f"{path}:{line}: is not UTF-8 text (byte 0x{data[exc.start]:02x})") from None
    return parse(text, str(path))


def parse(text: str, label: str, positions: bool = True) -> Node:
    """Parses the single document in `text`. Errors start with `label`, and `line:column` unless `positions` is off.

    Raises HarnessError for bad syntax, tags other than str, int, float, bool, null, seq and map, duplicate keys,
    keys that are not text, recursion, infinities, control characters, an empty text, a second document, and a
    document that is nested too deeply or too large once its aliases are expanded.
    """
    return _Composer(text, label, positions).document()


class _Composer:
    """One pass over the events of one text. An alias reuses its node and counts the node's size again."""

    def __init__(self, text: str, label: str, positions: bool) -> None:
        self._label, self._positions = label, positions
        self._anchors: dict[str, Node | None] = {}  # None while the node is being built
        self._budget = MAX_NODES
        if bad := UNSAFE.search(text):
            line = text.count("\n", 0, bad.start())
            column = bad.start() - (text.rfind("\n", 0, bad.start()) + 1)
            raise HarnessError(f"{self._at(line, column)}: control character {bad.group()!a} is not allowed")
        self._loader = _Loader(text)

    def document(self) -> Node:
        self._next()  # the stream's start
        if isinstance(self._next(), yaml.StreamEndEvent):
            raise HarnessError(f"{self._label}: is empty")
        root = self._node(self._next(), depth=0)
        self._next()  # the document's end
        after = self._next()
        if not isinstance(after, yaml.StreamEndEvent):
            raise self._error(after, "a second document starts here; only one is allowed")
        return root

    def _next(self) -> Any:
        try:
            return self._loader.get_event()
        except yaml.MarkedYAMLError as exc:
            mark = exc.problem_mark or exc.context_mark
            at = self._at(mark.line, mark.column) if mark else self._label
            raise HarnessError(f"{at}: invalid YAML: {exc.problem or exc.context}") from None
        except yaml.YAMLError as exc:
            raise HarnessError(f"{self._label}: invalid YAML: {' '.join(str(exc).split())}") from None

    def _at(self, line: int, column: int) -> str:
        return f"{self._label}:{line + 1}:{column + 1}" if self._positions else self._label

    def _where(self, event: Any) -> str:
        return self._at(event.start_mark.line, event.start_mark.column)

    def _error(self, event: Any, text: str) -> HarnessError:
        return HarnessError(f"{self._where(event)}: {text}")

    def _spend(self, event: Any, size: int) -> None:
        self._budget -= size
        if self._budget < 0:
            raise self._error(event, f"expands to more than {MAX_NODES:,} values")

    def _node(self, event: Any, depth: int, key_at: str = "") -> Node:
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, depth, key_at)
        if depth > MAX_DEPTH:
            raise self._error(event, f"nested more than {MAX_DEPTH} levels deep")
        if event.anchor:
            self._anchors[event.anchor] = None
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            self._require_tag(event, "seq")
            value = self._sequence(depth + 1)
        else:
            self._require_tag(event, "map")
            value = self._mapping(depth + 1)
        node = Node(value, self._where(event), key_at)
        self._spend(event, 1 if node.height else node.size)  # children have spent theirs
        if event.anchor:
            self._anchors[event.anchor] = node
        return node

    def _alias(self, event: Any, depth: int, key_at: str) -> Node:
        if event.anchor not in self._anchors:
            raise self._error(event, f"alias *{event.anchor} has no anchor before it")
        node = self._anchors[event.anchor]
        if node is None:
            raise self._error(event, f"*{event.anchor} contains itself")
        if depth + node.height > MAX_DEPTH:
            raise self._error(event, f"nested more than {MAX_DEPTH} levels deep")
        self._spend(event, node.size)
        return dataclasses.replace(node, key_at=key_at)

    def _sequence(self, depth: int) -> list[Node]:
        items = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            items.append(self._node(event, depth))
        return items

    def _mapping(self, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        inherited: dict[str, Node] = {}
        merges = False
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise self._error(event, "a key must be plain text")
            merge = self._tag(event) == _TAG + "merge"
            key = "<<" if merge else self._scalar(event)
            if not isinstance(key, str):
                raise self._error(event, f"a key must be text, got {shown(key)}; quote it if text is meant")
            if len(key) > MAX_KEY:
                raise self._error(event, f"key {shown(key)} is longer than {MAX_KEY} characters")
            if (merges and merge) or (not merge and key in entries):
                raise self._error(event, f"duplicate key {shown(key)}")
            value = self._node(self._next(), depth, self._where(event))
            if merge:
                merges = True
                inherited = self._inherited(value)
            else:
                entries[key] = value
        return entries | {key: node for key, node in inherited.items() if key not in entries}

    def _inherited(self, value: Node) -> dict[str, Node]:
        """The entries that `<<: value` merges in; of several mappings the earliest wins."""
        entries: dict[str, Node] = {}
        for source in reversed(value.items or [value]):  # in place: of thousands, each copy would be of all so far
            if not isinstance(source.value, dict):
                raise source.error(f"<< merges a mapping or a list of mappings, got {shown(source.value)}")
            entries.update(source.value)
        return entries

    def _tag(self, event: Any) -> str:
        """The tag of a scalar, resolved by the rules of YAML 1.1 if the file gives none."""
        if event.tag in (None, "!"):
            tag = str(self._loader.resolve(yaml.ScalarNode, event.value, event.implicit))
            # YAML 1.1 reads 1e-5 as text; we read it as a number, as JSON does
            plain = not event.style and tag == _TAG + "str"
            return _TAG + "float" if plain and _EXPONENT.fullmatch(event.value) else tag
        return str(event.tag)

    def _require_tag(self, event: Any, kind: str) -> None:
        if event.tag not in (None, "!", _TAG + kind):
            raise self._error(event, f"tag {shown(event.tag)} is not allowed")

    def _scalar(self, event: Any) -> str | int | float | bool | None:
        kind, text = self._tag(event).removeprefix(_TAG), event.value
        if event.style == '"' and (bad := UNSAFE.search(text)):  # written as an escape
            raise self._error(event, f"control character {bad.group()!a} is not allowed")
        if kind == "str":
            return str(text)
        if kind not in ("int", "float", "bool", "null"):
            if event.tag:
                raise self._error(event, f"tag {shown(event.tag)} is not allowed")
            raise self._error(event, f"{shown(text)} reads as a {kind}; quote it if text is meant")
        if len(text) > TEXT_UNIT or ":" in text:  # YAML 1.1 reads 1:30 as the number 90
            raise self._error(event, f"{shown(text)} is not a plain number; quote it if text is meant")
        try:
            node = yaml.ScalarNode(_TAG + kind, text)
            value = getattr(self._loader, f"construct_yaml_{kind}")(node)
        except (ValueError, KeyError, IndexError, yaml.YAMLError):
            raise self._error(event, f"{shown(text)} is not a valid {kind}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise self._error(event, f"{shown(text)} is not a finite number")
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise self._error(event, f"{shown(text)} does not fit in 64 bits")
        return value  # type: ignore[no-any-return]
