"""Resolves an environment's pins: `python -m engines.environments NAME > engines/environments/NAME.txt`.

pip resolves the requirements without installing them. This interpreter needs torch, which DeepSpeed's setup.py imports.
Versions in constraints.txt apply to all environments but those whose own pins conflict, so that engines share packages.
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

#: Requirements by environment, beside the harness's own dependencies.
REQUIREMENTS: Mapping[str, Sequence[str]] = {
    "harness": ("vl-convert-python", "sqlalchemy", "ruptures"),
    "offload": (*_TORCH, "accelerate", "greenlet", "gguf", "nvidia-ml-py", "vl-convert-python"),
    "accelerate": (*_TORCH, "accelerate", "hqq", "lm-eval==0.4.13", "datasets"),
    "deepspeed": (*_TORCH, "accelerate", "deepspeed==0.19.8", "ninja"),
    "flexgen": (*_TORCH, "flexgen==0.1.8"),
    "llamacpp": ("xllamacpp==2026.10.11549", "gguf", "numpy", "safetensors"),
    "airllm": (*_TORCH, "accelerate", "airllm==4.0.0"),
    # vLLM needs CUDA: === excludes torch's CPU build, which does not require the CUDA libraries
    "vllm": ("vllm", "torch===2.13.0", "transformers", "numpy"),
    "helm": ("torch==2.13.0", "crfm-helm==0.5.16"),
}
#: Environments whose own pins conflict with constraints.txt.
_UNCONSTRAINED = ("vllm", "helm")


def pins(name: str) -> str:
    """The requirements file of environment `name`. Raises CalledProcessError where pip cannot resolve it."""
    requirements = [*REQUIREMENTS[name], "setuptools", "wheel"]
    if name != "helm":  # HELM runs on its own, without a worker of the harness
        requirements += tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    constraints = [] if name in _UNCONSTRAINED else ["-c", str(_ROOT / "constraints.txt")]
    options = ["--quiet", "--dry-run", "--ignore-installed", "--no-build-isolation", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, *constraints, *requirements]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    packages = [entry["metadata"] for entry in report["install"]]
    # without the local version label, so that pip may install an index's CPU build
    lines = sorted((f"{p['name']}=={p['version'].partition('+')[0]}" for p in packages), key=str.lower)
    header = f"# python -m engines.environments {name}; requirements: {' '.join(REQUIREMENTS[name])}"
    return "\n".join([header, *lines]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(pins(sys.argv[1]))
