"""What a folder of converted weights says of itself: the sizes of its files, and what wrote them. Imports no torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.common.regular_file import read_json

#: Part of a folder's key: raise it when the same checkpoint's files are laid out differently.
LAYOUT = 1
#: Part of the key of folders with quantized tiles: raise it when the same values get other codes. 1 rounded between a
#: group's least value and its largest, 2 and 3 are kernels/least_squares.py, which started from other ranges in 2.
QUANTIZER = 3
_FILE = "manifest.json"


def write(folder: Path, layout: int, quantizer: int | None) -> None:
    """Writes the manifest of a folder that is otherwise complete; `quantizer` is None where no tile is quantized."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / _FILE).write_text(json.dumps({"layout": layout, "quantizer": quantizer, "sizes": sizes}, indent=1))


def problem(folder: Path) -> str | None:
    """What is wrong with a folder: empty where it is whole, None where it has no manifest. Raises OSError."""
    if not (folder / _FILE).exists():
        return None
    try:
        sizes = {str(name): int(size) for name, size in _read(folder)["sizes"].items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"{folder / _FILE} is damaged"
    for name, size in sizes.items():
        path = folder / name
        actual = path.stat().st_size if path.exists() else 0
        if actual != size:
            return f"{path} has {actual} of {size} bytes"
    return ""


def is_outdated(folder: Path) -> bool:
    """Whether another layout or quantizer wrote a folder, so that nothing reads it; False where it has no manifest."""
    try:
        manifest = _read(folder)
        return manifest["layout"] != LAYOUT or manifest["quantizer"] not in (None, QUANTIZER)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _read(folder: Path) -> Mapping[str, Any]:
    manifest: Mapping[str, Any] = read_json(folder / _FILE)
    return manifest
