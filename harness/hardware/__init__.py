"""Hardware profiles: those that are shipped, and a user's own files."""

from __future__ import annotations

import difflib
from pathlib import Path

from harness import suite_check, yaml_source
from harness.api import HardwareProfile, HarnessError

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The shipped profiles."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load(name: str) -> HardwareProfile:
    """A shipped profile by its name, or a file's.

    Raises HarnessError for a name or file that there is not, and for each figure that is missing, absurd or unknown.
    """
    path = Path(name)
    if not path.suffix and len(path.parts) == 1:
        path = _FOLDER / f"{name}.yaml"
        if name not in names():
            near = difflib.get_close_matches(name, names(), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise HarnessError(f"no hardware profile {name!r}{hint} (shipped: {', '.join(names())}; or give a file)")
    profile = suite_check.hardware(yaml_source.read(path))
    profile.validate()
    return profile
