"""What to run: models, workloads, policies, limits, and the cell that combines them."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from harness.api.common import FORBID, Bits, Dtype, HarnessError, Schedule, Status, Tune, UnsupportedError
from harness.api.nano import NanoOrder
from harness.api.secrets import secrets_in, without_logins, without_secret_options, without_secrets
from harness.api.serial import to_json
from harness.api.workload import WorkloadSpec


@dataclass(frozen=True)
class ModelSpec:
    """A model: a hub id (`facebook/opt-1.3b`), a folder of safetensors, a GGUF file, `package:NAME` for a model inside
    an installed package, or `fake` for the fake engine.

    `weights: dummy` makes a seeded random checkpoint with the shape of `id` on first use; `weights: pickle` reads
    `pytorch_model.bin`, which `auto` refuses. `dtype` is the dtype of the stored weights; `auto` keeps the
    checkpoint's. A GGUF file is unpacked to it.
    """

    __pydantic_config__ = FORBID

    id: str
    weights: Literal["auto", "dummy", "pickle"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    revision: str | None = None


@dataclass(frozen=True)
class OffloadPolicy:
    """Where tensors live and in which order they are computed. An engine refuses settings that it cannot honour.

    The fractions of each triple (device, host, disk: wg wc wd for weights, cg cc cd for the KV cache, hg hc hd for
    activations) sum to 1; None leaves the placement to the engine. 16 bits keep the checkpoint's precision; fewer
    quantize in groups of `group_size` values, weights along a matrix's inputs or outputs (`weight_groups`).
    With a device the host attends to what it holds of the KV cache (`cpu_attention`), and multiplies experts that it
    holds (`cpu_experts`) where that ends sooner than copying them.
    `weight_format`: bfloat16 weights can be kept in 12 bits, with the same values. `compute_dtype`: int8 rounds
    activations to eight bits where they are multiplied with quantized weights. Without `overlap`, transfers and
    arithmetic alternate. A sweep splits its batch into `nano_batches`: a number of them, a NanoOrder as text, or `auto`
    for what `harness tune` kept for the model on this machine, else 1; with `nano_overlap` the attention of one runs
    beside the products of another. `pipeline`: ranks, each a process with its own limits, that hold a part of the
    layers each; hidden states travel between them in the dtype that is computed in, or in `wire_bits`. `tensor`: ranks
    that hold a part of every matrix each instead, and add up their products. With `async_scheduling` a pass is formed
    while the one before computes, where the engine gains by it.
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
    weight_format: Literal["auto", "plain", "exact12"] = "auto"
    cpu_attention: bool = False
    cpu_experts: bool = False
    value_sparsity: float = 1.0
    overlap: bool = True
    nano_batches: int | str = 1
    nano_overlap: bool = True
    prefill_chunk: int | None = None
    threads: int | None = None
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    pipeline: int = 1
    wire_bits: Literal[8] | None = None
    tensor: int = 1
    async_scheduling: bool = False

    @property
    def ranks(self) -> int:
        """Processes that hold the model together, each with limits of its own."""
        return self.pipeline * self.tensor

    @property
    def block_size(self) -> int:
        """Sequences that share one pass over the weights."""
        return self.gpu_batch_size * self.num_gpu_batches

    @property
    def nano_count(self) -> int:
        """Parts of a sweep's batch; 1 where `auto` is not settled yet."""
        if isinstance(self.nano_batches, int):
            return self.nano_batches
        return 1 if self.nano_order is None else self.nano_order.nano_batches

    @property
    def nano_order(self) -> NanoOrder | None:
        """The order of products that `nano_batches` is, if any. Raises HarnessError for one that cannot run."""
        if isinstance(self.nano_batches, int) or self.nano_batches == "auto":
            return None
        return NanoOrder.parse(self.nano_batches)

    @property
    def overlaps_nano_batches(self) -> bool:
        """Whether the attention of one nano-batch runs beside the products of another."""
        return self.nano_count > 1 and self.nano_overlap

    @property
    def has_batch_beside(self) -> bool:
        """Whether there is another batch to multiply while the host attends for one."""
        return self.num_gpu_batches > 1 or self.overlaps_nano_batches

    @property
    def batches_per_pass(self) -> int:
        """Batches of a pass at most, nano-batches counted singly."""
        return self.num_gpu_batches * self.nano_count

    def float_dtype(self, engine: str, stored: Dtype) -> Dtype:
        """The dtype that `engine`, which has no int8 arithmetic, computes in; `stored`, the model's, for auto. Raises
        UnsupportedError for int8."""
        if self.compute_dtype == "int8":
            raise UnsupportedError(f"engine {engine} has no policy.compute_dtype int8; leave it out, or use another")
        return stored if self.compute_dtype == "auto" else self.compute_dtype

    def value_bytes(self, bits: Bits, plain_bytes: float) -> float:
        """Bytes of a value stored in `bits`, with its share of its group's scale and minimum, each in float16.

        `plain_bytes`: those of a value that is not quantized.
        """
        return plain_bytes if bits == 16 else bits / 8 + 4 / self.group_size

    def validate(self) -> None:
        """Raises HarnessError naming the first field that is out of range."""
        for name in ("gpu_batch_size", "num_gpu_batches", "group_size", "pipeline", "tensor"):
            if getattr(self, name) < 1:
                raise HarnessError(f"policy.{name} is {getattr(self, name)}; it must be at least 1")
        if self.nano_count < 1:
            raise HarnessError(f"policy.nano_batches is {self.nano_batches}; it must be at least 1, or auto, "
                               "or an order of products")  # fmt: skip
        for name in ("prefill_chunk", "threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise HarnessError(f"policy.{name} is {getattr(self, name)}; it must be at least 1, or left out")
        if not self.nano_overlap and self.nano_batches == 1:
            raise HarnessError("policy.nano_overlap is false and nano_batches is 1, of which nothing overlaps; set "
                               "nano_batches to 2 or more")  # fmt: skip
        if not self.nano_overlap and self.nano_order is not None:
            raise HarnessError("policy.nano_overlap is false and nano_batches is an order of products, which overlap; "
                               "leave one out")  # fmt: skip
        if self.weight_format == "exact12" and self.weight_bits != 16:
            raise HarnessError(f"policy.weight_format is exact12 and weight_bits is {self.weight_bits}; weights have "
                               "one format: leave one out")  # fmt: skip
        if self.compute_dtype == "int8" and self.weight_bits not in (4, 8):
            raise HarnessError(f"policy.compute_dtype is int8 and weight_bits is {self.weight_bits}; int8 arithmetic "
                               "is for weights of 8 or 4 bits: set weight_bits, or leave it out")  # fmt: skip
        if self.wire_bits is not None and self.pipeline == 1:
            raise HarnessError(f"policy.wire_bits is {self.wire_bits} and pipeline is 1, where nothing travels; set "
                               "pipeline to 2 or more, or leave it out")  # fmt: skip
        if not 0 < self.value_sparsity <= 1:
            raise HarnessError(f"policy.value_sparsity is {self.value_sparsity}; it must lie in (0, 1]")
        self._validate_fractions()

    def _validate_fractions(self) -> None:
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
class RankLink:
    """What connects the ranks of a launch: the bits/s that each can send, None for no limit, and the seconds from one
    to another."""

    rate: int | None
    delay_s: float


@dataclass(frozen=True)
class HardwareLimits:
    """Limits on a launch: bytes of memory, threads, and bytes/s of the disk. None is no limit. Host memory includes the
    page cache.

    `link_rate` and `link_delay_s`: bits/s and seconds of the links between ranks; None for both: the host's own.
    """

    __pydantic_config__ = FORBID

    device_memory: int | None = None
    host_memory: int | None = None
    threads: int | None = None
    disk_bandwidth: int | None = None
    link_rate: int | None = None
    link_delay_s: float | None = None

    @property
    def link(self) -> RankLink | None:
        """The link of each rank to the others; None where the host's own connects them."""
        if self.link_rate is None and self.link_delay_s is None:
            return None
        return RankLink(self.link_rate, self.link_delay_s or 0.0)

    @property
    def gpu(self) -> bool:
        """Whether the launch uses a device."""
        return self.device_memory is not None


@dataclass(frozen=True)
class HardwareRequirements:
    """What a machine must have before a suite is worth starting: bytes, and cores.

    `machine`: the kind of the machine, a resource of that name in a Ray cluster; without a cluster it is this machine.
    """

    __pydantic_config__ = FORBID

    device_memory: int = 0
    host_memory: int = 0
    disk_free: int = 0
    cores: int = 0
    machine: str = ""


@dataclass(frozen=True)
class RunSpec:
    """One cell: every setting that affects a measurement, and the labels that reports show."""

    engine: str
    model: ModelSpec
    workload: WorkloadSpec
    policy: OffloadPolicy = OffloadPolicy()
    tune: Tune = "none"
    #: Values of settings to try, by `options.NAME`, `policy.FIELD` or `env.NAME`; the fastest are taken. See
    #: harness.run.tuning.
    candidates: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)  # environment variables of the engine's process
    limits: HardwareLimits = HardwareLimits()
    seed: int = 0
    warmup: int = 1
    timeout_s: float = 1800.0
    latency_s: float | None = None  # a searched policy's limit for a block, from its first token to its last
    launcher: str = "process"
    image: str = ""  # of a container; by default the engine's
    environment: str = ""  # of the launcher venv; by default the engine's
    repeats: int = 3
    # labels: they never change what is measured
    suite: str = ""
    name: str = ""
    expect: Status = "ok"
    reference: bool = False

    LABELS: ClassVar[tuple[str, ...]] = ("suite", "name", "expect", "reference", "repeats", "timeout_s")
    #: Fields added later. At their defaults they stay out of the fingerprint, so that it equals that of older records.
    _LATER: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "": {"latency_s": None, "launcher": "process", "image": "", "environment": "", "candidates": {}, "env": {}},
        "workload": {
            "trace": "",
            "task": "",
            "process": "poisson",
            "rate": None,
            "cv": 1.0,
            "concurrency": None,
            "duration_s": None,
            "lengths": "",
            "rounds": 1,
            "think_s": 0.0,
            "slo": None,
            "stop_when": None,
        },
        "policy": {
            "weight_groups": "input",
            "weight_format": "auto",
            "pipeline": 1,
            "wire_bits": None,
            "tensor": 1,
            "overlap": True,
            "nano_batches": 1,
            "nano_overlap": True,
            "async_scheduling": False,
            "cpu_experts": False,
        },
        "limits": {"disk_bandwidth": None, "link_rate": None, "link_delay_s": None},
    }  # fmt: skip

    def with_settings(self, settings: Mapping[str, Any]) -> "RunSpec":
        """The cell with other values of `options.NAME`, `policy.FIELD` and `env.NAME`."""
        spec = self
        for path, value in settings.items():
            section, _, name = path.partition(".")
            if section == "options":
                spec = dataclasses.replace(spec, options={**spec.options, name: value})
            elif section == "env":
                spec = dataclasses.replace(spec, env={**spec.env, name: value})
            else:
                spec = dataclasses.replace(spec, policy=dataclasses.replace(spec.policy, **{name: value}))
        return spec

    def without_secrets(self) -> "RunSpec":
        """The cell as records and listings show it: `***` for values of `env` and `options` that may be secrets, and
        for logins in URLs."""
        model = dataclasses.replace(self.model, id=without_logins(self.model.id))
        workload = dataclasses.replace(self.workload, trace=without_logins(self.workload.trace))
        options, image = without_secret_options(self.options), without_logins(self.image)
        return dataclasses.replace(
            self, env=without_secrets(self.env), options=options, model=model, workload=workload, image=image
        )

    def secrets(self) -> frozenset[str]:
        """The values that `without_secrets` hides."""
        return secrets_in(self.env, self.options, self.model.id, self.workload.trace, self.image)

    def fingerprint(self) -> str:
        """Stable hash (16 hex digits) of every setting but the labels, which include repeats and the timeout.

        Secrets count by their names only: from the hash of a short one it could be guessed.
        """
        body = {k: v for k, v in to_json(self.without_secrets()).items() if k not in self.LABELS}
        for section, later in self._LATER.items():
            kept = body[section] if section else body
            kept = {k: v for k, v in kept.items() if k not in later or v != later[k]}
            body = body | {section: kept} if section else kept
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SuiteSpec:
    """A suite file after expansion: its cells in order, and its requirements on the machine."""

    name: str
    description: str
    cells: tuple[RunSpec, ...]
    requires: HardwareRequirements = HardwareRequirements()
    machine_probe: bool = True
    predictions: bool = True
