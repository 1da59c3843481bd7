"""Turns a plan into what runs it: a suite, and the settings of `harness generate`."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from harness import registry
from harness.api import HardwareProfile

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def suite_of(
    cell: Mapping[str, Any], model: str, memory: str | None, profile: HardwareProfile
) -> dict[str, Any] | None:
    """A suite of one cell, by a suite's own keys, with the limits that the plan was made for.

    A shipped shape gets random weights, so that nothing is downloaded. None for an engine that only plans know.
    """
    if cell["engine"] not in registry.engines():
        return None
    limits: dict[str, int | str] = {} if memory is None else {"host_memory": memory}
    if memory is None and cell["host_memory"] is not None:
        limits["host_memory"] = cell["host_memory"]
    if profile.device is not None:
        limits["device_memory"] = int(profile.device.memory)
    name = _UNSAFE.sub("-", model.rstrip("/").rpartition("/")[2]).strip("-._") or "model"
    return {
        "name": f"plan-{name}"[:64],
        "description": f"the policy that harness plan chose for {profile.name}",
        "model": {"id": model}
        | ({"weights": "dummy", "dtype": cell["dtype"]} if model in registry.shapes().CATALOGUE else {}),
        "workload": cell["workload"],
        **({"hardware": {"limits": limits}} if limits else {}),
        "matrix": [{"engine": cell["engine"], "policy": cell["policy"]}],
    }


def is_configuration(model: str) -> bool:
    """Whether a model is named by its config.json alone, which has no weights to run."""
    path = Path(model).expanduser()
    return path.suffix != ".gguf" and path.is_file()


def suite_yaml(suite: Mapping[str, Any]) -> str:
    """The suite as a file, which says what its model's weights are."""
    text = yaml.safe_dump(suite, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    comment = ""
    if "weights" in suite["model"]:
        comment = "# random weights of this shape; for a checkpoint leave out `weights`, or give its folder as `id`\n"
    elif is_configuration(suite["model"]["id"]):
        comment = "# a configuration has no weights: predict this by --simulate, or give the model's folder as `id`\n"
    return comment + text


def generate_command(suite: Mapping[str, Any]) -> str:
    """The `harness generate` that answers a file of requests by the suite's policy."""
    (cell,) = suite["matrix"]
    limits = suite.get("hardware", {}).get("limits", {})
    words = ["harness", "generate", "--model", suite["model"]["id"], "--engine", cell["engine"]]
    words += ["--input", "prompts.jsonl", "--output", "answers.jsonl"]
    if "host_memory" in limits:
        words += ["--memory", str(limits["host_memory"])]
    settings = {f"policy.{key}": value for key, value in cell["policy"].items()}
    settings |= {f"limits.{key}": value for key, value in limits.items() if key != "host_memory"}
    for key, value in settings.items():
        words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words)
