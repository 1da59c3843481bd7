"""`harness doctor`: what this machine can measure, and what stands in the way."""

import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from harness.api import HarnessError
from harness.cli.errors import EXIT_FAILED, say
from harness.cli.options import cache_option, json_option
from harness.cli.tables import Row, print_rows
from harness.common.compiler import compiler_command
from harness.common.files import nearest_existing
from harness.common.system import WORKS, runs_engines


@click.command()
@json_option()
@cache_option("The cache folder to check")
def doctor(as_json: bool, cache: Path) -> None:
    """Check what this machine can measure and run, and say what mends the rest. Exit code 1 if there is a problem.

    \b
    Example:
      harness doctor
    """
    rows = [*_machine(), *_tools(), *_cache(cache), *_engines()]
    if as_json:
        print_rows(rows, as_json)
    else:
        print_rows([{name: row[name] for name in ("check", "state", "detail")} for row in rows])
        say("\n" + "\n".join(_told(rows)))
    sys.exit(EXIT_FAILED if any(row["state"] == "problem" for row in rows) else 0)


def _check(name: str, ok: bool, detail: str, otherwise: str = "limited", mend: str = "") -> Row:
    """A row whose state is ok or `otherwise`: `limited` works with less speed or fewer figures, `problem` does not.
    `mend`: the command that mends it, where there is one."""
    return {"check": name, "state": "ok" if ok else otherwise, "detail": detail, "mend": "" if ok else mend}


def _told(rows: Sequence[Row]) -> Iterator[str]:
    """What can be run here; and what cannot, why, and the command that mends it."""
    engines = [row for row in rows if row["check"].startswith("engine ")]
    ready = [row["check"].removeprefix("engine ") for row in engines if row["state"] == "ok"]
    if not runs_engines():
        yield f"you can run no engine: they need Linux; {WORKS}"
        return
    begin = "begin with `harness run quickstart`, or `harness init --model M`"
    yield f"you can run: {', '.join(ready) or 'nothing'}; {begin}"
    for row in rows:
        if row["mend"]:
            yield f"not: {row['check']}, because {row['detail']} -> {row['mend']}"


def _machine() -> Iterator[Row]:
    from harness.common.host_memory import own_limit
    from harness.hardware import provenance

    machine = provenance.machine()
    flags = " ".join(machine["cpu_flags"])
    yield _check("cpu", True, f"{machine['cpu']}, {machine['cores_usable']} usable cores, {flags}")
    ram, swap = machine["ram_bytes"] / 2**30, machine["swap_bytes"]
    yield _check("memory", True, f"{ram:.1f} GiB, swap {'unknown' if swap is None else f'{swap / 2**30:.1f} GiB'}")
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
    try:
        words = compiler_command()
    except HarnessError as exc:
        yield _check("C++ compiler", False, str(exc))
        return
    compiler = shlex.join(words)
    if words and not shutil.which(words[0]):
        yield _check("C++ compiler", False, f"CXX is {compiler}, which is not there", mend="export CXX=COMPILER")
        return
    without = "none: engine offload runs without its kernels, more slowly; install g++ or set CXX"
    yield _check(
        "C++ compiler", bool(compiler), compiler or without, mend="apt-get install g++, or export CXX=COMPILER"
    )


def _cache(cache: Path) -> Iterator[Row]:
    existing = nearest_existing(cache)
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    free = f"{cache}: {shutil.disk_usage(existing).free / 2**30:.0f} GiB free"
    yield _check("cache", writable, free if writable else f"{free}, not writable", otherwise="problem",
                 mend="export HARNESS_CACHE=FOLDER")  # fmt: skip
    measured = any(cache.glob("hardware-*.yaml")) if writable else False
    unknown = "this machine is not measured: plans for it have no profile"
    yield _check("calibration", measured, "measured" if measured else unknown, mend="harness calibrate")


def _engines() -> Iterator[Row]:
    from harness import registry

    if not runs_engines():
        yield _check("engines", False, f"they need Linux, and this is {platform.system()}")
        return
    for name, entry in registry.engines().items():
        missing = entry.missing()
        detail = f"missing {', '.join(missing)}" if missing else entry.summary
        mend = entry.remedy
        if missing and not entry.extra and entry.environment:
            mend = f"harness run SUITE --engine {name} --launcher venv"
        yield _check(f"engine {name}", not missing, detail, mend=mend)
