"""What must be the same on every node: this project's code and the packages of an engine."""

from collections.abc import Mapping

from harness import registry
from harness.api import HarnessError
from harness.hardware import provenance
from harness.launchers.images import code_digest


def versions_for(*engines: str) -> dict[str, str]:
    """What this host has of what these engines need, by package, and a digest of the harness's code."""
    packages = [package for engine in engines for package in registry.engine_entry(engine).requires]
    return {"the harness's code": code_digest(), **provenance.package_versions(packages)}


def require_same(asked: Mapping[str, str], *engines: str) -> None:
    """Raises HarnessError where this host has not what the one that asks has."""
    own = versions_for(*engines)
    for name, version in asked.items():
        if own.get(name) != version:
            raise HarnessError(
                f"it has {name} {own.get(name, 'not installed')}, the command's host {version}: install the same on "
                "every node"
            )
