"""`harness doctor`: what this machine can measure, and what stands in the way."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from harness.cli.errors import EXIT_FAILED
from harness.cli.options import cache_option, json_option
from harness.cli.tables import Row, print_rows
from harness.common.compiler import compiler_command
from harness.common.files import nearest_existing


@click.command()
@json_option()
@cache_option("The cache folder to check")
def doctor(as_json: bool, cache: Path) -> None:
    """Check what this machine can measure, and say what limits it. Exit code 1 if there is a problem.

    \b
    Example:
      harness doctor
    """
    rows = [*_machine(), *_tools(), *_cache(cache), *_engines()]
    print_rows(rows, as_json)
    sys.exit(EXIT_FAILED if any(row["state"] == "problem" for row in rows) else 0)


def _check(name: str, ok: bool, detail: str, otherwise: str = "limited") -> Row:
    """A row whose state is ok or `otherwise`: `limited` works with less speed or fewer figures, `problem` does not."""
    return {"check": name, "state": "ok" if ok else otherwise, "detail": detail}


def _machine() -> Iterator[Row]:
    from harness.common.host_memory import own_limit
    from harness.hardware import provenance

    machine = provenance.machine()
    flags = " ".join(machine["cpu_flags"])
    yield _check("cpu", True, f"{machine['cpu']}, {machine['cores_usable']} usable cores, {flags}")
    ram, swap = machine["ram_bytes"] / 2**30, machine["swap_bytes"] / 2**30
    yield _check("memory", True, f"{ram:.1f} GiB, swap {swap:.1f} GiB")
    if limit := own_limit():
        yield _check("memory limit", False, f"{limit / 2**30:.1f} GiB for the cgroup of this process")
    gpus = machine["gpus"]
    yield _check("gpu", bool(gpus), ", ".join(g["name"] for g in gpus) or "none: engines run on the CPU")


def _tools() -> Iterator[Row]:
    """What measurements and kernels depend on."""
    from harness.launchers.memory import cap_method

    method = cap_method()
    capped = method != "monitor"
    sampled = "no writable memory cgroup: a sampling monitor caps anonymous memory, not the page cache"
    yield _check("memory cap", capped, f"{method}, page cache counted" if capped else sampled)
    rapl = any(os.access(p, os.R_OK) for p in Path("/sys/class/powercap").glob("intel-rapl:*/energy_uj"))
    yield _check("energy", rapl, "RAPL counters" if rapl else "no readable counter: energy is null")
    compiler = shlex.join(compiler_command())
    without = "none: engine offload runs without its kernels, more slowly; install g++ or set CXX"
    yield _check("C++ compiler", bool(compiler), compiler or without)


def _cache(cache: Path) -> Iterator[Row]:
    existing = nearest_existing(cache)
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    free = f"{cache}: {shutil.disk_usage(existing).free / 2**30:.0f} GiB free"
    yield _check("cache", writable, free if writable else f"{free}, not writable", otherwise="problem")


def _engines() -> Iterator[Row]:
    from harness import registry

    for name, entry in registry.engines().items():
        missing = entry.missing()
        yield _check(f"engine {name}", not missing, f"missing {', '.join(missing)}" if missing else entry.summary)
