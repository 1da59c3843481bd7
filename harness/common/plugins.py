"""Plug-ins: engines, launchers and tasks of other distributions, listed from entry points without importing them."""

import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from harness.api import HarnessError, first_line

#: Groups of entry points: `NAME = package.module:Class` in each.
ENGINES, LAUNCHERS, TASKS = "offload_harness.engines", "offload_harness.launchers", "offload_harness.tasks"


@dataclass(frozen=True)
class Plugin:
    """An entry point: its name and target (`module:Class`), and the distribution that declares it."""

    name: str
    target: str
    distribution: str
    summary: str
    rivals: tuple[str, ...] = ()  # other distributions that declare the same name

    def __str__(self) -> str:
        return f"plug-in {self.name!r} of {self.distribution}"


@functools.cache
def plugins(group: str) -> dict[str, Plugin]:
    """The plug-ins of a group by name, sorted. Reads only the metadata of distributions on sys.path."""
    by_name: dict[str, Plugin] = {}
    for plugin in sorted(_declared(group), key=lambda plugin: (plugin.name, plugin.distribution)):
        known = by_name.setdefault(plugin.name, plugin)
        if known.distribution != plugin.distribution:
            by_name[plugin.name] = replace(known, rivals=(*known.rivals, plugin.distribution))
    return by_name


def _declared(group: str) -> Iterator[Plugin]:
    """The entry points of a group; of a distribution that is on the path twice, those of the first."""
    seen = set()
    for found in metadata.distributions():
        try:
            if not (entries := found.entry_points.select(group=group)):
                continue  # most of them: their metadata need not be read
            about = found.metadata
            name = about["Name"]
        except Exception:  # half installed, or damaged: no command of ours may fail for it
            continue
        if name and name not in seen:
            seen.add(name)
            for entry in entries:
                yield Plugin(entry.name, entry.value, f"{name} {about['Version']}", about["Summary"] or "")


def clash(plugin: Plugin, built_in: bool) -> str:
    """Why a plug-in's name is ambiguous, in one line; empty if it is not."""
    others = [*(["the harness itself"] if built_in else []), *plugin.rivals]
    if not others:
        return ""
    return f"{plugin} has the name of one of {' and of '.join(others)}: uninstall one of them"


def resolve(target: str) -> Any:
    """The object behind "module:name"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def build(plugin: Plugin, kind: type, /, *arguments: Any, **options: Any) -> Any:
    """An object of the plug-in's class, as of the protocol `kind`.

    Raises HarnessError if it cannot be imported, is no class, or lacks members of `kind`.
    """
    try:
        factory = resolve(plugin.target)
    except (Exception, SystemExit) as exc:  # importing runs arbitrary code
        raise HarnessError(f"{plugin} cannot be imported: {type(exc).__name__}: {first_line(exc)}") from exc
    if not callable(factory):
        raise HarnessError(f"{plugin}: {plugin.target} is no class")
    made = factory(*arguments, **options)
    members = getattr(kind, "__protocol_attrs__", None) or {n for n in dir(kind) if not n.startswith("_")}
    if lacking := sorted(name for name in members if not hasattr(made, name)):
        raise HarnessError(f"{plugin} is no {kind.__name__}: {plugin.target} lacks {', '.join(lacking)}")
    return made
