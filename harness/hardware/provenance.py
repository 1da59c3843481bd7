"""Provenance of a measurement: hardware, software and code, without names of hosts, people or folders."""

import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from harness.api import is_secret, without_logins
from harness.common.env import ENV_PREFIXES
from harness.common.host_cpu import cpu_flags, cpuinfo
from harness.common.host_memory import UNKNOWN, total_memory
from harness.common.system import usable_cpus

#: Instruction sets that affect the speed of engines' kernels.
_FLAGS = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
          "amx_tile", "amx_int8", "amx_bf16", "avx_vnni", "asimd", "asimddp", "bf16", "i8mm", "sve")  # fmt: skip
#: What git or nvidia-smi may take and print: a driver that is stuck takes for ever.
_TOOL_S, _TOOL_BYTES = 20.0, 1 << 20


def collect() -> dict[str, Any]:
    """Provenance of this machine and of this code."""
    return {
        "machine": machine(),
        "python": platform.python_version(),
        "harness": package_versions(("offload-harness",)).get("offload-harness", "not installed"),
        "git": git_state(Path(__file__).parent),
    }


def machine() -> dict[str, Any]:
    """CPU, memory, devices and kernel; None for unknown values."""
    cpu, flags = cpuinfo(), cpu_flags()
    return {
        "cpu": cpu.get("model name") or platform.processor() or None,
        "cpu_flags": [f for f in _FLAGS if f in flags],
        "cores_physical": _known(lambda: psutil.cpu_count(logical=False)),
        "cores_usable": usable_cpus(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "ram_bytes": total_memory(),
        "swap_bytes": _known(lambda: psutil.swap_memory().total),
        "gpus": gpus(),
        "os": f"{platform.system()} {platform.release()}",
        "container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
    }


def _known(read: Callable[[], int | None]) -> int | None:
    """What `read` gives; None where the system does not tell, such as without /proc."""
    try:
        return read()
    except UNKNOWN:
        return None


def machine_key() -> str:
    """Hash of the hardware that affects memory and speed; the key of results that hold for this machine only."""
    description = machine()
    stable = {k: description[k] for k in ("cpu", "cpu_flags", "cores_usable", "ram_bytes", "gpus")}
    return hashlib.sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()[:12]


def gpus() -> list[dict[str, str]]:
    """Name, memory and driver of each NVIDIA GPU, from nvidia-smi; empty if there is none."""
    text = said_by(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    rows = (line.split(", ") for line in (text or "").splitlines())
    return [dict(zip(("name", "memory", "driver"), row, strict=True)) for row in rows if len(row) == 3]


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of the installed distributions among `names`."""
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit, and whether tracked files differ from it; None where no repository tracks a file of `folder`, such as
    for a package that is installed in an environment inside somebody's repository."""
    git = ["git", "--no-optional-locks", "-C", str(folder)]  # without its locks: a kill would leave the index locked
    commit, changes = said_by([*git, "rev-parse", "HEAD"]), said_by([*git, "status", "--porcelain", "-uno"])
    if not said_by([*git, "ls-files", "--", "."]):
        return None
    return None if commit is None or changes is None else {"commit": commit.strip(), "dirty": bool(changes)}


def said_by(command: list[str]) -> str | None:
    """What a small tool of this machine prints; None where there is none, or it fails, hangs or prints without end."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
        )
    except OSError:
        return None
    assert process.stdout is not None
    with process, _killed_after(process, _TOOL_S):
        text = process.stdout.read(_TOOL_BYTES + 1)
        if len(text) <= _TOOL_BYTES and process.wait() == 0:
            return text.decode(errors="replace")
    return None


@contextlib.contextmanager
def _killed_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    """Kills the process group of `process` after some time, or at the end where it still runs."""

    def kill() -> None:
        if not hasattr(os, "killpg"):  # Windows has no process groups
            process.kill()
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if process.returncode is None:  # not reaped, so the group's number is still its own
            kill()


def settings() -> dict[str, str]:
    """Environment variables that affect an engine's speed or memory allocation, without those that may hold secrets."""
    prefixes = (*ENV_PREFIXES, "CUDA_VISIBLE_DEVICES")
    known = ((name, value) for name, value in sorted(os.environ.items()) if name.startswith(prefixes))
    return {name: without_logins(value) for name, value in known if not is_secret(name)}


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def scrub(text: str, places: Mapping[str, str]) -> str:
    """Replaces this machine's folders with placeholders, longest first, and logins in URLs, so that records can be
    shared."""
    text = without_logins(text)
    placeholders = dict.fromkeys(_homes(), "$HOME") | dict(places)
    for path in sorted(placeholders, key=len, reverse=True):
        pattern = re.escape(path) + r"(?=[/\s'\":,;)\]]|$)"
        text = re.sub(pattern, lambda _, p=path: placeholders[p], text)  # type: ignore[misc]
    return text


def _homes() -> set[str]:
    """The user's home as it is named and as it is resolved; empty where there is none."""
    try:
        home = str(Path.home())
    except RuntimeError:  # HOME is not set, and the user id has no entry
        return set()
    return {home, os.path.realpath(home)} - {"/", ""}
