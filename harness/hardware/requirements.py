"""Checks that a machine meets a suite's requirements."""

import math
import shutil
from contextlib import suppress
from pathlib import Path

from harness.api import SuiteSpec
from harness.common.files import nearest_existing
from harness.common.host_memory import own_limit
from harness.common.system import usable_cpus
from harness.hardware import provenance


def check_requirements(suite: SuiteSpec, cache: Path, resuming: bool = False) -> list[str]:
    """The suite's requirements that this machine does not meet, one line each.

    A resumed run does not check free disk, since its first part has already used some of the required space.
    """
    need, lacking = suite.requires, []
    memory = min(provenance.machine()["ram_bytes"], own_limit() or math.inf)
    if memory < need.host_memory:
        lacking.append(f"host memory: {_gib(need.host_memory)} required, {_gib(memory)} present")
    if need.device_memory:
        largest = max((_bytes(gpu["memory"]) for gpu in provenance.gpus()), default=0.0)
        if largest < need.device_memory:
            lacking.append(f"device memory: {_gib(need.device_memory)} required, {_gib(largest)} present")
    if (cores := usable_cpus()) < need.cores:
        lacking.append(f"cores: {need.cores} required, {cores} usable")
    if need.disk_free and not resuming:
        free = shutil.disk_usage(nearest_existing(cache)).free
        held = _held(cache)  # models and converted weights that an earlier run has left, perhaps for this one
        if free + held < need.disk_free:
            lacking.append(f"free disk: {_gib(need.disk_free)} required, {_gib(free)} free at the cache")
    return lacking


def _bytes(told: str) -> float:
    """Of a device's memory as nvidia-smi tells it; any number of a device whose memory is the host's ("[N/A]")."""
    try:
        return float(told.partition(" ")[0]) * 2**20
    except ValueError:
        return math.inf


def _held(folder: Path) -> int:
    """Bytes of the files in a folder; other processes may remove some meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size if path.is_file() else 0
    return total


def _gib(value: float) -> str:
    return f"{value / 2**30:.1f} GiB"
