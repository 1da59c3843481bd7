"""The lanes: how many trials each has at full length, and how one is run."""

import importlib
from collections.abc import Callable
from typing import cast

from tests.faults.bench import Bench

#: Trials at full length. A soak is one trial, of so many minutes.
LANES = {
    "kill": 300, "disk_full": 600, "read_errors": 90, "power_cut": 300, "clock": 40, "crowd": 12, "stop": 12,
    "soak": 1, "limits": 10,
}  # fmt: skip

Trial = Callable[[Bench, int], None]


def trial_of(lane: str) -> Trial:
    """What runs the trial of a seed, and raises AssertionError for what went wrong. Lanes import torch, or do not."""
    return cast(Trial, importlib.import_module(f"tests.faults.{lane}").trial)
