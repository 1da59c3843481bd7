"""The Python API: engines, suites, plans and comparisons as the command line has them, for scripts and notebooks.

Nothing heavy is imported before it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from harness.api import HarnessError

if TYPE_CHECKING:
    from offload_harness.comparisons import Comparisons, compare
    from offload_harness.engine import Completion, Engine
    from offload_harness.plans import Plan, plan
    from offload_harness.runs import Run, read_run, run_suite

__all__ = ["Comparisons", "Completion", "Engine", "HarnessError", "Plan", "Run", "compare", "plan", "read_run",
           "run_suite"]  # fmt: skip

#: The module beside this one that each public name is from.
_HOMES = {
    **dict.fromkeys(("Comparisons", "compare"), "comparisons"),
    **dict.fromkeys(("Completion", "Engine"), "engine"),
    **dict.fromkeys(("Plan", "plan"), "plans"),
    **dict.fromkeys(("Run", "read_run", "run_suite"), "runs"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'offload_harness' has no attribute {name!r}")
    return getattr(importlib.import_module(f"offload_harness.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
