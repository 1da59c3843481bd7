"""`harness ls`: the engines, shipped suites, built-in model shapes and hardware profiles that there are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli.options import cache_option, json_option
from harness.cli.tables import Row, print_rows
from harness.common.system import runs_engines

if TYPE_CHECKING:
    from harness.builtin import EngineEntry


@click.command()
@click.argument("what", type=click.Choice(["engines", "suites", "models", "hardware"]))
@json_option()
@cache_option("Where environments are built")
def ls(what: str, as_json: bool, cache: Path) -> None:
    """List engines (and what each needs to run here), shipped suites, model shapes or hardware profiles.

    \b
    Examples:
      harness ls engines
      harness ls hardware --json
    """
    rows = {"engines": lambda: _engines(cache), "suites": _suites, "models": _models, "hardware": _hardware}
    print_rows(rows[what](), as_json)


def _engines(cache: Path) -> list[Row]:
    """Every engine, and whether it can run in this interpreter, in its own environment and in a container."""
    from harness import registry
    from harness.builtin import NOT_BUILT
    from harness.launchers.venv import VirtualEnvironments

    venvs, images = VirtualEnvironments(cache), _images()
    rows = []
    for name, entry in registry.engines().items():
        own = entry.environment
        pinned = registry.environment_pins(own).exists()
        rows.append(
            {
                "engine": name,
                "process": "not installed" if entry.missing() else "ready" if runs_engines() else "needs Linux",
                "venv": "no pins" if not pinned else "built" if venvs.built(own) else "buildable",
                "image": "set `image`" if entry.plugin else images.get(own, "buildable") if pinned else "no pins",
                "description": entry.summary,
                "remedy": _remedy(entry),
            }
        )
    absent = {"process": "not built", "venv": "not built", "image": "not built"}
    return rows + [
        {"engine": name, **absent, "description": what, "remedy": why} for name, (what, why) in NOT_BUILT.items()
    ]


def _remedy(entry: EngineEntry) -> str:
    missing = entry.missing()
    needs = [f"needs {', '.join(missing)}: {entry.remedy}"] if missing else []
    return "; ".join([*needs, *([f"needs {entry.needs}"] if entry.needs else [])])


def _images() -> dict[str, str]:
    """The state of each environment's image."""
    from harness import registry
    from harness.api import HarnessError
    from harness.launchers import images

    try:
        return {row["environment"]: row["state"].replace("not built", "buildable") for row in images.built()}
    except HarnessError:
        return dict.fromkeys(registry.environments(), "no container engine")


def _suites() -> list[Row]:
    """Shipped suites; `time` is that of committed runs on two cores, `disk` what checkpoints take at least."""
    from harness.suite.shipped import checkpoint_bytes, expected_minutes, shipped_suites

    minutes = expected_minutes()
    return [
        {
            "suite": suite.name,
            "cells": len(suite.cells),
            "launches": sum(c.repeats for c in suite.cells),
            "time": _duration(minutes.get(suite.name)),
            "disk": f"{checkpoint_bytes(suite) / 2**30:.1f} GiB",
            "description": suite.description,
        }
        for suite in shipped_suites()
    ]


def _duration(minutes: float | None) -> str:
    """A duration, rounded; a suite without a committed run has none."""
    if minutes is None:
        return "not measured"
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _models() -> list[Row]:
    """Built-in model shapes; `weights: dummy` makes random weights of these without a download."""
    from harness import registry

    return [
        {
            "model": name,
            "family": s.family,
            "layers": s.num_layers,
            "hidden": s.hidden,
            "heads": s.num_heads,
            "kv_heads": s.num_kv_heads,
            "parameters": f"{s.params_total / 1e9:.2f}B",
            "16-bit": f"{2 * s.params_total / 2**30:.1f} GiB",
        }
        for name, s in registry.shapes().CATALOGUE.items()
    ]


def _hardware() -> list[Row]:
    """The shipped hardware profiles, which `harness plan` takes."""
    from harness import hardware

    rows = []
    for name in hardware.names():
        p = hardware.load(name)
        device = f"{p.devices} x {p.device.name}, {p.device.memory / 2**30:.0f} GiB" if p.device else "none"
        host = f"{p.host.memory / 2**30:.0f} GiB"
        rows.append({"hardware": name, "device": device, "host": host, "description": p.description})
    return rows
