"""The suites that come with the package."""

import json
from pathlib import Path

import suites
from harness import registry
from harness.api import DTYPE_BYTES, HarnessError, SuiteSpec
from harness.suite.config import load_suite

_FOLDER = Path(suites.__file__).parent


#: Minutes that suites took in committed runs, and which; `python docs/model/expected.py` writes it.
EXPECTED = _FOLDER / "expected.json"


def expected_minutes() -> dict[str, float]:
    """Minutes of all launches of a suite, by its name, on the two cores of committed runs; only for those that ran."""
    return {name: entry["minutes"] for name, entry in json.loads(EXPECTED.read_text()).items()}


def checkpoint_bytes(suite: SuiteSpec) -> int:
    """Bytes of disk that a suite needs: what it says, or those of its random checkpoints, each once.

    Checkpoints from the hub, and copies that engines convert, are not counted.
    """
    shapes = registry.shapes().CATALOGUE
    models = {cell.model for cell in suite.cells if cell.model.weights == "dummy" and cell.model.id in shapes}
    dtypes = {"auto": "bfloat16"}
    sizes = (DTYPE_BYTES[dtypes.get(m.dtype, m.dtype)] * shapes[m.id].params_total for m in models)
    return max(suite.requires.disk_free, sum(sizes))


def shipped_suites() -> list[SuiteSpec]:
    """Loads every shipped suite, in the order of their names."""
    return [load_suite(path) for path in sorted(_FOLDER.glob("*.yaml"))]


def find_suite(name: str) -> Path:
    """The path of a suite, given as a file or as the name of a shipped suite. Raises HarnessError if it is neither."""
    path = Path(name)
    shipped = _FOLDER / f"{name}.yaml"
    bare = len(path.parts) == 1
    if bare and not path.is_file() and shipped.exists():
        return shipped
    if path.exists() or path.suffix or not bare:
        return path
    known = ", ".join(sorted(p.stem for p in _FOLDER.glob("*.yaml")))
    raise HarnessError(f"no suite file or shipped suite {name!r} (shipped: {known})")
