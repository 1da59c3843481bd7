"""The suites that come with the package."""

from pathlib import Path

import suites
from harness.api import HarnessError, SuiteSpec
from harness.suite.config import load_suite

_FOLDER = Path(suites.__file__).parent


def shipped_suites() -> list[SuiteSpec]:
    """Loads every shipped suite, in the order of their names."""
    return [load_suite(path) for path in sorted(_FOLDER.glob("*.yaml"))]


def find_suite(name: str) -> Path:
    """The path of a suite, given as a file or as the name of a shipped suite. Raises HarnessError if it is neither."""
    path = Path(name)
    if path.exists() or path.suffix or len(path.parts) > 1:
        return path
    shipped = _FOLDER / f"{name}.yaml"
    if shipped.exists():
        return shipped
    known = ", ".join(sorted(p.stem for p in _FOLDER.glob("*.yaml")))
    raise HarnessError(f"no suite file or shipped suite {name!r} (shipped: {known})")
