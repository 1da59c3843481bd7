"""What to run: models, workloads, policies, limits, and the cell that holds them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from harness.api.common import FORBID, Bits, HarnessError, Schedule, Status, Tune, UnsupportedError
from harness.api.serial import to_json


@dataclass(frozen=True)
class ModelSpec:
    """A model by hub id (`facebook/opt-1.3b`), folder of safetensors, GGUF file, `package:NAME` of an installed package
    that brings one, or `fake` for the fake engine.

    `weights: dummy` makes a seeded random checkpoint of that id's shape on first use, and `weights: pickle` reads
    `pytorch_model.bin`, which `auto` refuses. `dtype` is the dtype of the stored weights, `auto` the checkpoint's
    own; a GGUF file is unpacked into it.
    """

    __pydantic_config__ = FORBID

    id: str
    weights: Literal["auto", "dummy", "pickle"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    revision: str | None = None


@dataclass(frozen=True)
class WorkloadSpec:
    """Synthetic requests: `num_requests` prompts of `prompt_len` random tokens, `gen_len` new tokens each.

    `auto` runs whole blocks at the engine's own batch, as many as it needs for a steady state. Of kind `trace` the
    lengths are those of a file's lines instead, `prompt_len` and `gen_len` the most that is taken of each. A trace is
    known by its path: one whose content changes needs another. Of kind `task` the requests are an accuracy task's
    examples, all of them or the first `num_requests`, with lengths of their own.
    """

    __pydantic_config__ = FORBID

    kind: Literal["synthetic", "trace", "task"] = "synthetic"
    prompt_len: int = 128
    gen_len: int = 16
    num_requests: int | Literal["auto"] = "auto"
    trace: str = ""
    task: str = ""

    @property
    def words(self) -> str:
        """What is asked for."""
        if self.kind == "task":
            return f"task {self.task}"
        lengths = f"prompt {self.prompt_len}, generate {self.gen_len}"
        return lengths if self.kind == "synthetic" else f"lengths of {Path(self.trace).name} up to {lengths}"

    @property
    def label(self) -> str:
        """The same, short enough for names."""
        if self.kind == "task":
            return self.task
        lengths = f"p{self.prompt_len}g{self.gen_len}"
        return lengths if self.kind == "synthetic" else f"{Path(self.trace).stem}-{lengths}"


@dataclass(frozen=True)
class OffloadPolicy:
    """Where tensors live and in which order they are computed; what an engine cannot honour it refuses.

    Fractions (wg wc wd weights, cg cc cd KV cache, hg hc hd activations; device, host, disk) sum to 1 in
    each triple; None leaves the placement to the engine. Bits of 16 mean the checkpoint's precision;
    fewer are codes in groups of `group_size` values, of weights along a matrix's inputs or its outputs. Without
    `overlap` transfers and arithmetic take turns. `nano_batches` are parts of a sweep's batch; with `nano_overlap` one
    attends while another's products run.
    Source: FlexGen (Sheng et al. 2023), section 4.3.
    """

    __pydantic_config__ = FORBID

    gpu_batch_size: int = 1
    num_gpu_batches: int = 1
    schedule: Schedule = "row"
    weights: tuple[float, float, float] | None = None
    cache: tuple[float, float, float] | None = None
    activations: tuple[float, float, float] | None = None
    weight_bits: Bits = 16
    kv_bits: Bits = 16
    group_size: int = 64
    weight_groups: Literal["input", "output"] = "input"
    cpu_attention: bool = False
    value_sparsity: float = 1.0
    overlap: bool = True
    nano_batches: int = 1
    nano_overlap: bool = True
    prefill_chunk: int | None = None
    threads: int | None = None
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    @property
    def block_size(self) -> int:
        """Sequences that share one pass over the weights."""
        return self.gpu_batch_size * self.num_gpu_batches

    def validate(self) -> None:
        """Raises HarnessError naming the first field that is out of range."""
        for name in ("gpu_batch_size", "num_gpu_batches", "group_size", "nano_batches"):
            if getattr(self, name) < 1:
                raise HarnessError(f"policy.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("prefill_chunk", "threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise HarnessError(f"policy.{name} is {getattr(self, name)}; it must be at least 1, or left out")
        if not 0 < self.value_sparsity <= 1:
            raise HarnessError(f"policy.value_sparsity is {self.value_sparsity}; it must lie in (0, 1]")
        for name in ("weights", "cache", "activations"):
            triple = getattr(self, name)
            if triple is None:
                continue
            if any(not 0 <= f <= 1 for f in triple) or abs(sum(triple) - 1) > 1e-6:
                raise HarnessError(
                    f"policy.{name} is {list(triple)}; device, host and disk fractions must lie in [0, 1] and sum to 1"
                )

    def require_defaults_except(self, engine: str, *honoured: str) -> None:
        """Raises UnsupportedError for the first field that is set but not among `honoured`."""
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name not in honoured and value != f.default:
                raise UnsupportedError(
                    f"engine {engine} has no policy.{f.name} (got {value}); it honours {', '.join(honoured)}"
                )


@dataclass(frozen=True)
class HardwareLimits:
    """What the model's work may take, in bytes, and bytes/s of the disk. None is no limit. Host memory counts the page
    cache."""

    __pydantic_config__ = FORBID

    device_memory: int | None = None
    host_memory: int | None = None
    threads: int | None = None
    disk_bandwidth: int | None = None


@dataclass(frozen=True)
class HardwareRequirements:
    """What a machine must have, in bytes, before a suite is worth starting."""

    __pydantic_config__ = FORBID

    device_memory: int = 0
    host_memory: int = 0
    disk_free: int = 0


@dataclass(frozen=True)
class RunSpec:
    """One cell: everything that decides what is measured, and the labels under which it is shown."""

    engine: str
    model: ModelSpec
    workload: WorkloadSpec
    policy: OffloadPolicy = OffloadPolicy()
    tune: Tune = "none"
    options: Mapping[str, Any] = field(default_factory=dict)
    limits: HardwareLimits = HardwareLimits()
    seed: int = 0
    warmup: int = 1
    timeout_s: float = 1800.0
    latency_s: float | None = None  # of a block, from its first token to its last, where the policy is searched
    launcher: str = "process"
    image: str = ""  # of a container, where it is not the engine's own
    repeats: int = 3
    # labels: they change what is shown, never what is measured
    suite: str = ""
    name: str = ""
    expect: Status = "ok"
    reference: bool = False

    LABELS: ClassVar[tuple[str, ...]] = ("suite", "name", "expect", "reference", "repeats", "timeout_s")
    #: Fields that came later: where they are left alone, what was measured before them is still the same.
    _LATER: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "": {"latency_s": None, "launcher": "process", "image": ""},
        "workload": {"trace": "", "task": ""},
        "policy": {"weight_groups": "input", "overlap": True, "nano_batches": 1, "nano_overlap": True},
        "limits": {"disk_bandwidth": None},
    }

    def fingerprint(self) -> str:
        """Stable hash (16 hex digits) of all that is measured; labels, repeats and the timeout are left out."""
        body = {k: v for k, v in to_json(self).items() if k not in self.LABELS}
        for section, later in self._LATER.items():
            kept = body[section] if section else body
            kept = {k: v for k, v in kept.items() if k not in later or v != later[k]}
            body = body | {section: kept} if section else kept
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SuiteSpec:
    """A suite file after expansion: its cells in order, and what the machine must have."""

    name: str
    description: str
    cells: tuple[RunSpec, ...]
    requires: HardwareRequirements = HardwareRequirements()
    machine_probe: bool = True
