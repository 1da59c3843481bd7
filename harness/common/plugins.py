"""Plug-ins: engines, launchers and tasks of other distributions, listed from entry points without importing them."""

import functools
import importlib
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
    for entry in sorted(metadata.entry_points(group=group), key=lambda e: (e.name, e.dist.name if e.dist else "")):
        about = entry.dist.metadata if entry.dist else None
        distribution = f"{about['Name']} {about['Version']}" if about else "an unknown distribution"
        known = by_name.get(entry.name)
        if known and known.distribution != distribution:
            by_name[entry.name] = replace(known, rivals=(*known.rivals, distribution))
        elif not known:
            summary = about["Summary"] or "" if about else ""
            by_name[entry.name] = Plugin(entry.name, entry.value, distribution, summary)
    return by_name


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
    except Exception as exc:  # importing runs arbitrary code
        raise HarnessError(f"{plugin} cannot be imported: {type(exc).__name__}: {first_line(exc)}") from exc
    if not callable(factory):
        raise HarnessError(f"{plugin}: {plugin.target} is no class")
    made = factory(*arguments, **options)
    members = getattr(kind, "__protocol_attrs__", None) or {n for n in dir(kind) if not n.startswith("_")}
    if lacking := sorted(name for name in members if not hasattr(made, name)):
        raise HarnessError(f"{plugin} is no {kind.__name__}: {plugin.target} lacks {', '.join(lacking)}")
    return made
