"""YAML values with their source positions, and their rendering in error messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.api import HarnessError

TEXT_UNIT = 64  # characters: a text counts as one value more per unit, and a message shows one unit of it


@dataclass(slots=True)
class Node:
    """A value and its source position. Trees share nodes, so a node never changes after it is built.

    `at` and `key_at` are `file:line:column`, or the text of a --set option. `size` counts this node and all nodes
    below it, a shared node once per use; `height` is the number of levels below it.
    """

    value: str | int | float | bool | list[Node] | dict[str, Node] | None
    at: str
    key_at: str = ""
    size: int = field(init=False)
    height: int = field(init=False)

    def __post_init__(self) -> None:
        self.size, self.height = 1, 0
        if isinstance(self.value, str):
            self.size += len(self.value) // TEXT_UNIT
        elif isinstance(self.value, list | dict) and (children := self.children):
            self.size += sum([child.size for child in children])
            self.height += 1 + max([child.height for child in children])

    @property
    def entries(self) -> dict[str, Node]:
        """The mapping's entries; nothing for any other value."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def items(self) -> list[Node]:
        """The list's items; nothing for any other value."""
        return self.value if isinstance(self.value, list) else []

    @property
    def children(self) -> Collection[Node]:
        return self.items or self.entries.values()

    def plain(self) -> Any:
        """The value as plain Python data."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def merged(self, over: Node) -> Node:
        """`over` laid on top: mappings merge key by key, anything else is replaced."""
        if not (isinstance(self.value, dict) and isinstance(over.value, dict)):
            return over
        entries = dict(self.value)
        for key, child in over.value.items():
            entries[key] = entries[key].merged(child) if key in entries else child
        return Node(entries, over.at, over.key_at)

    def only(self, *keys: str) -> Node:
        """The mapping's entries under these keys."""
        return Node({key: self.entries[key] for key in keys if key in self.entries}, self.at, self.key_at)

    def updated(self, entries: dict[str, Node]) -> Node:
        """The mapping with some entries replaced or added; any other value as it is."""
        return replace(self, value=self.value | entries) if isinstance(self.value, dict) else self

    def without(self, *keys: str) -> Node:
        """The mapping without these keys."""
        return Node({key: child for key, child in self.entries.items() if key not in keys}, self.at, self.key_at)

    def without_path(self, path: Sequence[str | int]) -> Node:
        """The tree without the deepest mapping entry on `path` that exists above any list."""
        key, *rest = path
        child = self.entries.get(str(key))
        if child is None:
            return self
        if rest and isinstance(rest[0], str) and rest[0] in child.entries:
            return self.updated({str(key): child.without_path(rest)})
        return self.without(str(key))

    def trace(self, path: Iterable[str | int]) -> list[Node]:
        """This node and those below it along `path`, as far as they exist."""
        nodes = [self]
        for part in path:
            here = nodes[-1]
            if isinstance(part, int) and part < len(here.items):
                nodes.append(here.items[part])
            elif isinstance(part, str) and part in here.entries:
                nodes.append(here.entries[part])
            else:
                break
        return nodes

    def find(self, path: Iterable[str | int]) -> Node:
        """The deepest node on `path` that exists."""
        return self.trace(path)[-1]

    def error(self, text: str) -> HarnessError:
        """An error at this value."""
        return HarnessError(f"{self.at}: {text}")


def shown(value: object) -> str:
    """A value as an error message shows it: one line of bounded length, in YAML notation."""
    match value:
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str() if len(value) > TEXT_UNIT:
            return f"{value[:TEXT_UNIT]!r}..."
        case _:
            return repr(value)
