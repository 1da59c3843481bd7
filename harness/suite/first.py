"""The suite that `harness init` writes: a model, a memory limit, and the engines that this machine has."""

import json
import re
from importlib import resources
from pathlib import Path

import yaml

from harness import registry
from harness.api import HarnessError
from harness.common.files import os_errors
from harness.common.host_memory import free_memory
from harness.common.surrogates import lone_surrogate
from harness.common.units import parse_size
from harness.suite.check import MAX_SUITE_NAME
from harness.suite.yaml_source import UNSAFE

#: Of the weights, what the limit holds: so an engine has to offload, and can. And of the free memory at most so much.
_OF_WEIGHTS, _OF_FREE = 0.6, 0.8
_LEAST = 256 << 20

_TEXT = """\
# yaml-language-server: $schema={schema}
# Compares engines on one model under one memory limit. `harness explain KEY` says what a key means.
name: {name}
model: {model}{weights_comment}
workload: {{kind: synthetic, prompt_len: 128, gen_len: 16, num_requests: auto}}  # auto: as many as a steady state takes
hardware:
  limits: {{host_memory: {memory}}}  # on top of an engine's idle process; the page cache counts
repeats: 3  # launches of each cell, in turns; comparisons need five, seven are a good number
matrix:
  # Our engine streams the weights; schedule sweep lets sequences at different positions share each pass.
  - {{name: offload-sweep, engine: offload, schedule: sweep, policy: {{gpu_batch_size: 16}}}}
  # The same weights in 4 bits: less to read, other answers.
  - {{name: offload-4bit, engine: offload, schedule: sweep, policy: {{gpu_batch_size: 16, weight_bits: 4}}}}
{rivals}"""
_ACCELERATE = """\
  # The largest batch that survives is searched once and remembered.
  - {name: accelerate, engine: accelerate, policy: max_batch}
"""
_RESIDENT = """\
  # What the limit costs: everything in memory. Measured once, never ranked.
  - {name: resident, engine: transformers, policy: {gpu_batch_size: 16}, limits: none, reference: true, repeats: 1}
"""
_DUMMY = "  # random weights of this shape, made once; leave `weights` out to download the model's own"


def first_suite(model: str, memory: str | None, name: str) -> str:
    """The text of a suite for `model`; `name` becomes a valid one. Raises HarnessError for `memory` that is no size,
    and for a model whose name no text can hold."""
    if lone_surrogate(model) or UNSAFE.search(model):
        why = "is not UTF-8" if lone_surrogate(model) else "has control characters"
        raise HarnessError(f"--model {model!a}: a suite cannot hold this name, which {why}; rename the model")
    path = Path(model).expanduser()
    shape = None if path.exists() else registry.shapes().CATALOGUE.get(model)
    weights = 2 * shape.params_total if shape else _bytes_below(path)
    free = int(_OF_FREE * free_memory())
    limit = min(free, max(_LEAST, int(_OF_WEIGHTS * weights))) if weights else free
    if memory is not None and not parse_size(memory):
        raise HarnessError(f"--memory {memory}: nothing fits; give a size such as 2GiB")
    spec = {"id": str(path.absolute()) if path.exists() else model}
    spec |= {"weights": "dummy", "dtype": "bfloat16"} if shape else {}
    engines = registry.engines()
    rivals = _ACCELERATE * (not engines["accelerate"].missing())
    rivals += _RESIDENT * (not engines["transformers"].missing() and 0 < weights < free)
    return _TEXT.format(
        schema=resources.files("harness.schema") / "suite.json",
        name=_suite_name(name),
        model=json.dumps(spec, ensure_ascii=False),
        weights_comment=_DUMMY if shape else "",
        memory=memory or f"{limit >> 20}MiB",
        rivals=rivals,
    )


def _suite_name(text: str) -> str:
    """A valid name as YAML has it: in quotes where it would be a number, a date or nothing."""
    name = re.sub(r"[^A-Za-z0-9._-]+|^[^A-Za-z0-9]+", "-", text).strip("-._")[:MAX_SUITE_NAME] or "suite"
    return name if name[0].isalpha() and yaml.safe_load(name) == name else json.dumps(name)


def write_new(path: Path, text: str) -> None:
    """Writes a file, all of it or none. Raises HarnessError where there is one already, or none can be written."""
    with os_errors(f"cannot write {path}", "choose another place with --out"):
        try:
            file = path.open("xb")
        except FileExistsError:
            raise HarnessError(f"{path} exists; choose another place with --out") from None
        try:
            with file:
                file.write(text.encode())
        except BaseException:  # no space, or Ctrl-C
            path.unlink(missing_ok=True)
            raise


def _bytes_below(path: Path) -> int:
    """Bytes of a model's files in 16 bits, as far as their names tell; 0 where it is not on this machine."""
    if path.is_file():  # a GGUF file, most of whose weights have four to five bits
        return 4 * path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) if path.is_dir() else 0
