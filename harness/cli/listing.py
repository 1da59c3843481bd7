"""What `ls` and `doctor` show: engines, suites, models, and what this machine can measure."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from pathlib import Path

from harness import registry
from harness.api import HarnessError
from harness.common.host_memory import own_limit
from harness.common.tables import Row
from harness.hardware import provenance
from harness.launchers import images
from harness.launchers.memory import make_group
from harness.launchers.venv import VirtualEnvironments
from harness.suite.shipped import shipped_suites


def engines(cache: Path) -> list[Row]:
    """Every engine: whether it can run in this interpreter, in an environment of its own and in a container, and what
    it lacks where it cannot; and what is not built at all."""
    venvs, of_image = VirtualEnvironments(cache), _images()
    rows = []
    for name, entry in registry.engines().items():
        missing, own = entry.missing(), entry.environment
        pinned = registry.environment_pins(own).exists()
        rows.append(
            {
                "engine": name,
                "process": "not installed" if missing else "ready",
                "venv": "no pins" if not pinned else "built" if venvs.built(own) else "buildable",
                "image": of_image.get(own, "buildable") if pinned else "no pins",
                "description": entry.summary,
                "remedy": "; ".join(
                    [*([f"needs {', '.join(missing)}: {entry.remedy}"] if missing else []),
                     *([f"needs {entry.needs}"] if entry.needs else [])]
                ),
            }
        )  # fmt: skip
    gone = {"process": "not built", "venv": "not built", "image": "not built"}
    return rows + [
        {"engine": name, **gone, "description": what, "remedy": why} for name, (what, why) in registry.NOT_BUILT.items()
    ]


def _images() -> dict[str, str]:
    """The state of each environment's image; `no engine` for all where none answers."""
    try:
        return {row["environment"]: row["state"].replace("not built", "buildable") for row in images.built()}
    except HarnessError:
        return dict.fromkeys(registry.environments(), "no container engine")


def suites() -> list[Row]:
    """The shipped suites and their sizes."""
    rows = []
    for suite in shipped_suites():
        launches = sum(c.repeats for c in suite.cells)
        rows.append(
            {"suite": suite.name, "cells": len(suite.cells), "launches": launches, "description": suite.description}
        )
    return rows


def models() -> list[Row]:
    """Built-in model shapes, which `weights: dummy` makes without any download."""
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


def hardware() -> list[Row]:
    """The shipped hardware profiles, by which plans are made."""
    from harness import hardware as profiles

    rows = []
    for name in profiles.names():
        p = profiles.load(name)
        device = f"{p.devices} x {p.device.name}, {p.device.memory / 2**30:.0f} GiB" if p.device else "none"
        rows.append(
            {
                "hardware": name,
                "device": device,
                "host": f"{p.host.memory / 2**30:.0f} GiB",
                "description": p.description,
            }
        )
    return rows


def diagnose(cache: Path) -> list[Row]:
    """Checks with state ok, limited (still works, less well) or problem."""
    found = []

    def add(check: str, state: str, detail: str) -> None:
        found.append({"check": check, "state": state, "detail": detail})

    machine = provenance.machine()
    add("cpu", "ok", f"{machine['cpu']}, {machine['cores_usable']} usable cores, {' '.join(machine['cpu_flags'])}")
    add("memory", "ok", f"{machine['ram_bytes'] / 2**30:.1f} GiB, swap {machine['swap_bytes'] / 2**30:.1f} GiB")
    if limit := own_limit():
        add("memory limit", "limited", f"{limit / 2**30:.1f} GiB for the cgroup this runs in")
    gpus = machine["gpus"]
    add("gpu", "ok" if gpus else "limited", ", ".join(g["name"] for g in gpus) or "none: engines run on the CPU")
    group = make_group(None)
    group.close()
    detail = {"monitor": "no writable memory cgroup: a sampling monitor caps anonymous memory, not the page cache"}
    state = "limited" if group.method == "monitor" else "ok"
    add("memory cap", state, detail.get(group.method, f"{group.method}, page cache counted"))
    rapl = any(os.access(p, os.R_OK) for p in Path("/sys/class/powercap").glob("intel-rapl:*/energy_uj"))
    add("energy", "ok" if rapl else "limited", "RAPL counters" if rapl else "no readable counter: energy is null")
    compiler = shlex.join(registry.compiler().command())
    without = "none: engine offload works without its kernels, more slowly; install g++ or set CXX"
    add("C++ compiler", "ok" if compiler else "limited", compiler or without)
    with contextlib.suppress(StopIteration):
        existing = next(p for p in (cache, *cache.resolve().parents) if p.exists())
        writable = existing.is_dir() and os.access(existing, os.W_OK)
        free = shutil.disk_usage(existing).free / 2**30
        add(
            "cache",
            "ok" if writable else "problem",
            f"{cache}: {free:.0f} GiB free" + ("" if writable else ", not writable"),
        )
    for name, entry in registry.engines().items():
        missing = entry.missing()
        state, detail_ = "limited" if missing else "ok", f"missing {', '.join(missing)}" if missing else entry.summary
        add(f"engine {name}", state, detail_)
    return found
