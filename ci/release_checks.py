"""Says which public contract changed since the last release without the version that stability.md asks for.

`python ci/release_checks.py` in a checkout with its tags. Exit code 1, with a line for each, where there is any.
"""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Modules whose names are promised.
_MODULES = ("offload_harness", "harness/api")
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True)
class Contract:
    """What a version promises. `record`: the JSON Schema of records without words; `keys`: of suites, with their
    section; `names`: of the Python API, with their module."""

    version: tuple[int, ...]
    record_version: int
    record: Any
    keys: frozenset[str]
    names: frozenset[str]


def contract(read: Callable[[str], str]) -> Contract:
    """The contract of the tree whose files `read` gives by path."""
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    match = _VERSION.fullmatch(version)
    if match is None:
        sys.exit(f"pyproject.toml: version {version!r} is not MAJOR.MINOR.PATCH")
    record = json.loads(read("harness/schema/run_record.json"))
    suite = json.loads(read("harness/schema/suite.json"))
    sections = {"suite": suite, **suite["$defs"]}
    keys = {f"{name}.{key}" for name, section in sections.items() for key in _properties(section)}
    names = {f"{m.replace('/', '.')}.{name}" for m in _MODULES for name in _public(read(f"{m}/__init__.py"))}
    number = int(record["$comment"].partition("schema_version ")[2].partition(";")[0])
    return Contract(tuple(map(int, match.groups())), number, _without_words(record), frozenset(keys), frozenset(names))


def problems(before: Contract, now: Contract) -> list[str]:
    """What has changed without its version; a line each."""
    found = []
    if now.record != before.record and now.record_version <= before.record_version:
        found.append(
            f"records have other fields than in the last release, and schema_version is still {now.record_version}: "
            "raise SCHEMA_VERSION in harness/api/common.py, and let `parse_record` read the older ones"
        )
    # before 1.0 the minor number tells of what a major one tells later
    significant = 1 if now.version[0] else 2
    if now.version[:significant] <= before.version[:significant]:
        takes = "that takes a new major version (before 1.0: minor)"
        gone = sorted((before.keys - now.keys) | (before.names - now.names))
        found += [f"{name} was promised and is gone: {takes}" for name in gone]
    if now.version <= before.version:
        found.append("the version is that of the last release or older: raise it in pyproject.toml")
    return found


def _public(source: str) -> set[str]:
    """The names of a module: of its __all__, else those that it imports."""
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return set(ast.literal_eval(node.value))
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name for node in imports for alias in node.names}


def _properties(schema: Any) -> set[str]:
    """The keys of a section, in all the forms that it may have."""
    return set(schema.get("properties", {})).union(*map(_properties, schema.get("anyOf", ())))


def _without_words(schema: Any) -> Any:
    if isinstance(schema, dict):
        words = ("$comment", "description", "title", "markdownDescription")
        return {k: _without_words(v) for k, v in schema.items() if k not in words or isinstance(v, dict)}
    return [_without_words(v) for v in schema] if isinstance(schema, list) else schema


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Compares the commit that is checked out with the last tag before it."""
    now = contract(lambda path: _git("show", f"HEAD:{path}"))
    tags = _git("tag", "--merged", "HEAD", "--no-contains", "HEAD", "--sort=-v:refname", "--list", "v[0-9]*").split()
    if not tags:
        return  # nothing was promised yet
    if found := problems(contract(lambda path: _git("show", f"{tags[0]}:{path}")), now):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
