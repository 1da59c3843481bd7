"""What each key of a suite means, from keys.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml

from harness.api import HarnessError
from harness.common.words import nearest


@dataclass(frozen=True)
class Key:
    """A key: where it stands, what it means, its unit and default in words, an example, and the engines that heed it,
    all if none is named."""

    section: str
    name: str
    means: str
    example: str
    unit: str = ""
    default: str = ""
    engines: tuple[str, ...] = ()
    note: str = ""

    @property
    def path(self) -> str:
        """The key as `--set` writes it, `policy.threads`; one of a cell or of the suite stands alone."""
        prefix = {"suite": "", "cell": "", "requires": "hardware.requires."}.get(self.section, f"{self.section}.")
        return f"{prefix}{self.name}"


@cache
def keys() -> Mapping[str, Mapping[str, Key]]:
    """Every key by section (suite, requires, cell, model, workload, policy, limits) and name."""
    data = yaml.safe_load((resources.files("harness.suite") / "keys.yaml").read_text())
    return {
        section: {
            name: Key(section, name, **{**told, "engines": tuple(told.get("engines", ()))})
            for name, told in entries.items()
        }
        for section, entries in data.items()
    }


def find(path: str) -> list[Key]:
    """The keys that `path` may mean: `policy.threads` one, `threads` each of that name.

    Raises HarnessError with the nearest key for one that there is not.
    """
    every = [key for section in keys().values() for key in section.values()]
    found = [key for key in every if path in (key.path, key.name, f"{key.section}.{key.name}")]
    if not found:
        known = [name for key in every for name in (key.path, key.name)]
        raise HarnessError(
            f"no key of a suite is called {path!r:.80}; {nearest(path, known, 'harness explain lists them')}"
        )
    return found
