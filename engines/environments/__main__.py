"""Resolves an environment's pins again: `python -m engines.environments NAME` rewrites engines/environments/NAME.txt.

The packages are those that the file's first line names after `wanted:`, beside the harness's own dependencies; those
after `; without:` are left out, though others require them. A new environment begins as a file of that line alone. pip
resolves them without installing; this interpreter has to have torch, which DeepSpeed's set-up asks for its
requirements. Versions come from constraints.txt, so that engines share them, unless the line pins torch itself.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]
#: Environments that no worker of ours runs in: they have none of the harness's dependencies.
_STANDALONE = ("helm",)
#: flash-attn, which oLLM requires and we leave out, tells its requirements without CUDA's compiler only so.
_METADATA_ONLY = {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}


def file_of(name: str) -> Path:
    """The file of an environment's pins."""
    return Path(__file__).with_name(f"{name}.txt")


def wanted(name: str) -> tuple[list[str], list[str]]:
    """The packages that an environment is for, and those that are left out."""
    first = file_of(name).read_text(encoding="utf-8").partition("\n")[0].partition("wanted:")[2]
    packages, _, without = first.partition("; without:")
    return packages.split(), without.split()


def pins(name: str) -> str:
    """The list for environment `name`, as pip takes it. Raises CalledProcessError where pip resolves none."""
    asked, without = wanted(name)
    packages = [*asked, "setuptools", "wheel"]
    if name not in _STANDALONE:
        packages += tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pins_torch = any(package.startswith("torch==") for package in packages)
    constraints = [] if pins_torch else ["-c", str(_ROOT / "constraints.txt")]
    how = ["--quiet", "--dry-run", "--ignore-installed", "--no-build-isolation", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *how, *constraints, *packages]
    environment = os.environ | _METADATA_ONLY
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)
    resolved = [m for entry in report["install"] if (m := entry["metadata"])["name"] not in without]
    # without the local part of a version: a CPU build is taken where an index has one
    lines = sorted((f"{m['name']}=={m['version'].partition('+')[0]}" for m in resolved), key=str.lower)
    rest = f"; without: {' '.join(without)}" if without else ""
    head = f"# python -m engines.environments {name}; wanted: {' '.join(asked)}{rest}"
    return "\n".join([head, *lines]) + "\n"


if __name__ == "__main__":
    file_of(sys.argv[1]).write_text(pins(sys.argv[1]), encoding="utf-8")
