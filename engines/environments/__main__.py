"""Writes an environment's pins anew: `python -m engines.environments NAME > engines/environments/NAME.txt`.

pip resolves what is wanted without installing it; this interpreter has to have torch, which DeepSpeed's set-up asks for
its requirements. Versions that constraints.txt names are taken from it, so that engines share what they can.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TORCH = ("torch", "transformers", "safetensors", "numpy")

#: What each is for, beside the harness's own dependencies.
WANTED: Mapping[str, Sequence[str]] = {
    "harness": ("vl-convert-python", "sqlalchemy", "ruptures"),
    "offload": (*_TORCH, "accelerate", "greenlet", "gguf", "nvidia-ml-py", "vl-convert-python"),
    "accelerate": (*_TORCH, "accelerate", "hqq", "lm-eval==0.4.13", "datasets"),
    "deepspeed": (*_TORCH, "accelerate", "deepspeed==0.19.8", "ninja"),
    "flexgen": (*_TORCH, "flexgen==0.1.8"),
    "llamacpp": ("xllamacpp==2026.10.11549", "gguf", "numpy", "safetensors"),
    "airllm": (*_TORCH, "accelerate", "airllm==4.0.0"),
    # it runs with CUDA alone: of torch's builds never the one for CPUs, which names no libraries of CUDA
    "vllm": ("vllm", "torch===2.13.0", "transformers", "numpy"),
    "helm": ("torch==2.13.0", "crfm-helm==0.5.16"),
}
#: Whose own pins clash with ours.
_UNCONSTRAINED = ("vllm", "helm")


def pins(name: str) -> str:
    """The list for environment `name`, as pip takes it. Raises CalledProcessError where pip finds none."""
    wanted = [*WANTED[name], "setuptools", "wheel"]
    if name != "helm":  # it runs by itself: no worker of ours is in it
        wanted += tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    constraints = [] if name in _UNCONSTRAINED else ["-c", str(_ROOT / "constraints.txt")]
    how = ["--quiet", "--dry-run", "--ignore-installed", "--no-build-isolation", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *how, *constraints, *wanted]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    found = [entry["metadata"] for entry in report["install"]]
    # without the local part of a version: a CPU build is taken where an index has one
    lines = sorted((f"{m['name']}=={m['version'].partition('+')[0]}" for m in found), key=str.lower)
    return f"# python -m engines.environments {name}; wanted: {' '.join(WANTED[name])}\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(pins(sys.argv[1]))
