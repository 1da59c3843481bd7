"""Provenance of a measurement: hardware, software and code, without names of hosts, people or folders."""

import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from harness.common.env import ENV_PREFIXES
from harness.common.host_cpu import cpu_flags, cpuinfo

#: Instruction sets that affect the speed of engines' kernels.
_FLAGS = ("sse4_2", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
          "amx_tile", "amx_int8", "amx_bf16", "avx_vnni", "asimd", "asimddp", "bf16", "i8mm", "sve")  # fmt: skip


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
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_usable": len(os.sched_getaffinity(0)),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "ram_bytes": psutil.virtual_memory().total,
        "swap_bytes": psutil.swap_memory().total,
        "gpus": gpus(),
        "os": f"{platform.system()} {platform.release()}",
        "container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
    }


def machine_key() -> str:
    """Hash of the hardware that affects memory and speed; the key of results that hold for this machine only."""
    description = machine()
    stable = {k: description[k] for k in ("cpu", "cpu_flags", "cores_usable", "ram_bytes", "gpus")}
    return hashlib.sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()[:12]


def gpus() -> list[dict[str, str]]:
    """Name, memory and driver of each NVIDIA GPU, from nvidia-smi; empty if there is none."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (line.split(", ") for line in text.splitlines())
    return [dict(zip(("name", "memory", "driver"), row, strict=False)) for row in rows]


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of the installed distributions among `names`."""
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit, and whether tracked files differ from it; None outside a repository."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(folder), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def settings() -> dict[str, str]:
    """Environment variables that affect an engine's speed or memory allocation."""
    prefixes = (*ENV_PREFIXES, "CUDA_VISIBLE_DEVICES")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def scrub(text: str, places: Mapping[str, str]) -> str:
    """Replaces this machine's folders with placeholders, longest first, so that records can be shared."""
    home = str(Path.home())
    placeholders = {path: "$HOME" for path in (home, os.path.realpath(home)) if path not in ("/", "")} | dict(places)
    for path in sorted(placeholders, key=len, reverse=True):
        pattern = re.escape(path) + r"(?=[/\s'\":,;)\]]|$)"
        text = re.sub(pattern, lambda _, p=path: placeholders[p], text)  # type: ignore[misc]
    return text
