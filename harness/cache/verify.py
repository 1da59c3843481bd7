"""Whether what the cache folder holds is whole, as far as it says itself what it should be."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import hardware, registry
from harness.api import HarnessError
from harness.cache.entries import Entry
from harness.common.regular_file import read_json


@dataclass(frozen=True)
class Checked:
    """An entry and what is wrong with it: empty where it is whole, None where nothing tells."""

    entry: Entry
    problem: str | None


def verify(entries: list[Entry]) -> Iterator[Checked]:
    """Checks entries one by one; leftovers and what is being built are none. Reads headers and sizes, no weights."""
    for entry in entries:
        if entry.state not in ("leftover", "in use"):
            try:
                yield Checked(entry, _problem(entry))
            except HarnessError as exc:
                yield Checked(entry, str(exc))
            except OSError as exc:
                yield Checked(entry, f"{exc.filename or entry.path} cannot be read: {exc.strerror or exc}")


def _problem(entry: Entry) -> str | None:
    path = entry.path
    match entry.kind:
        case "models":
            registry.model_store().check(path)
            return ""
        case "downloads":
            return _download_problem(path)
        case "weights" if path.parent.name == "offload":
            return registry.converted_weights().problem(path)
        case "environments":
            python = path / "bin" / "python"
            return "" if os.access(python, os.X_OK) else f"{python} is missing, or its interpreter is"
        case "kernels" if path.parent.name == "kernels":
            library = path / "kernel.so"
            return "" if library.is_file() and library.stat().st_size else f"{library} is missing or empty"
        case "choices" if path.suffix == ".json":
            return _json_problem(path)
        case "choices" if path.suffix == ".yaml":
            hardware.load(str(path))
            return ""
    return None


def _download_problem(repository: Path) -> str | None:
    """The first problem of a snapshot that has weights in safetensors."""
    snapshots = [path for path in (repository / "snapshots").glob("*") if any(path.glob("*.safetensors"))]
    for snapshot in snapshots:
        registry.model_store().check(snapshot)
    return "" if snapshots else None


def _json_problem(path: Path) -> str:
    try:
        content = read_json(path)
    except ValueError as exc:
        return f"{path} is not JSON: {exc}"
    return "" if isinstance(content, dict) else f"{path} is not a JSON object"
