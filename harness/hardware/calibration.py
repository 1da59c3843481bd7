"""What `harness calibrate` measures, keeps and prints."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import click

from harness import hardware, registry
from harness.api import HardwareProfile, HarnessError, to_json
from harness.common.host_memory import own_limit
from harness.common.tables import print_rows
from harness.hardware import provenance

#: Rates that are steady on an idle machine, and by how much they may vary.
_STEADY, _NOISE = ("host.flops", "host.attention", "host.bandwidth", "disk.read"), 1.5
#: Rows of the product that is taken beside launches too, and its columns: hidden sizes of models.
_ROWS, _COLUMNS = 256, (512, 1024, 2048, 4096)


def calibrate(
    out: Path | None, quick: bool, cache: Path, report: Callable[[str], None]
) -> tuple[HardwareProfile, Path]:
    """Measures this host and writes its profile; `report` is told what is being measured.

    Raises HarnessError where that cannot be written.
    """
    path = out or hardware.local_path(cache)
    hardware.require_writable(path)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise HarnessError(f"{cache}: {exc.strerror}; give another folder by --cache-dir") from None
    measured = registry.calibrator().measure(cache, cache, quick, report)
    dtype = measured.host.dtype
    probed = {
        str(k): registry.machine_rates().gemm_rates([dtype], [_ROWS], k, 4 * k)[dtype][str(_ROWS)] for k in _COLUMNS
    }
    memory = min(measured.host.memory, own_limit() or math.inf)
    host = dataclasses.replace(measured.host, probed={k: max(samples) for k, samples in probed.items()}, memory=memory)
    profile = dataclasses.replace(measured, host=host, host_id=provenance.machine_key())
    profile.validate()
    hardware.save(profile, path)
    return profile, path


def show_profile(profile: HardwareProfile, as_json: bool) -> None:
    """Prints the measured rates with their spread, or as JSON the whole profile."""
    if as_json:
        click.echo(json.dumps(to_json(profile)))
        return
    rows = []
    for path, (low, high) in profile.spread.items():
        value = _at(profile, path)
        rows.append({"rate": path, "median": f"{value:.3g}", "lowest": f"{low:.3g}", "highest": f"{high:.3g}"})
    print_rows(rows, False)
    shaky = [path for path, (low, high) in profile.spread.items() if path.startswith(_STEADY) and high > _NOISE * low]
    if shaky:
        click.echo(f"\nnoisy: {', '.join(shaky)} varied by more than {_NOISE:g} times; measure again with nothing else "
                   "running", err=True)  # fmt: skip


def _at(profile: HardwareProfile, path: str) -> float:
    part: object = profile
    for name in path.split("."):
        part = part[name] if isinstance(part, dict) else getattr(part, name)
    assert isinstance(part, float)
    return part
