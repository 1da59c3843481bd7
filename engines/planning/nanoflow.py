"""NanoFlow's model of a pass of mixed requests: its operations, which resource bounds it, and the optimal throughput.

Source: NanoFlow (Zhu et al. 2025), section 3 and table 2. Its resources are arithmetic, device memory and network.
Copies to the device, host attention and the disk are added here, for what does not fit on the device.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engines.models.shapes import shape
from engines.planning.machine import Machine, attention_rate
from engines.planning.workload import VALUE_BYTES, Lengths, kv_bytes, kv_values, model_weight_bytes, sublayers
from harness.api import HarnessError, ModelShape, OffloadPolicy
from harness.common.published import published_rows

_LIMITS = ("arithmetic", "memory", "network")
#: Of its table 2: A100 80 GB, FLOP/s in float16, bytes/s of memory, and one way over NVLink.
_A100 = (312e12, 2e12, 300e9)
_DEVICES, _DENSE_BATCH = 8, 2048


@dataclass(frozen=True)
class Devices:
    """`count` equal devices: FLOP/s, bytes/s of memory, bytes/s that each sends to the others, and bytes of memory."""

    count: int
    flops: float
    bandwidth: float
    network: float
    memory: float = 80e9


@dataclass(frozen=True)
class Operation:
    """An operation's work in one pass, over all layers and devices."""

    name: str
    flops: float
    memory_bytes: float
    network_bytes: float = 0.0

    def seconds(self, devices: Devices) -> tuple[float, float, float]:
        """The least time by arithmetic, memory and network."""
        each = (self.flops / devices.flops, self.memory_bytes / devices.bandwidth, self.network_bytes / devices.network)
        return each[0] / devices.count, each[1] / devices.count, each[2] / devices.count


@dataclass(frozen=True)
class PassTimes:
    """The least seconds of a pass by each resource: `compute`, and those that may take longer."""

    compute: float
    others: Mapping[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """Each resource's time over that of arithmetic; NanoFlow's T_R is that of `memory`."""
        return {name: seconds / self.compute for name, seconds in self.others.items()}

    @property
    def bound_by(self) -> str:
        """The resource that takes longest; `compute` if none takes longer than arithmetic."""
        name, ratio = max(self.ratios.items(), key=lambda item: item[1])
        return name if ratio > 1 else "compute"


def serving_pass(shape: ModelShape, lengths: Lengths, devices: Devices) -> PassTimes:
    """A pass of as many requests as the devices' memory holds beside the weights. Source: section 3.3.

    Raises HarnessError if it does not hold the weights.
    """
    room = devices.count * devices.memory / VALUE_BYTES - shape.params_total
    if room <= 0:
        raise HarnessError(f"{devices.count} devices of {devices.memory:.3g} bytes do not hold {shape.params_total:,} "
                           "parameters in 16 bits")  # fmt: skip
    requests = room / (lengths.prompt + lengths.generated / 2) / (kv_values(shape) * shape.num_layers)
    rows = dense_batch_of(requests, lengths)
    sent = 4 * rows * shape.hidden * VALUE_BYTES * shape.num_layers * (devices.count - 1)
    return PassTimes(
        compute=2 * rows * (shape.params_total - shape.params_idle) / (devices.count * devices.flops),
        others={
            "memory": devices.memory / devices.bandwidth,
            "network": sent / (devices.count * devices.network),
        },
    )


def planned_pass(
    shape: ModelShape, policy: OffloadPolicy, lengths: Lengths, machine: Machine, between: float | None
) -> PassTimes:
    """A pass of a policy's block, with prompts as fast as sequences end, whatever its schedule.

    shape: of the model, or of a pipeline's stage, which sends its rows on at `between` bytes/s. policy: with all
    fractions.
    """
    assert policy.weights and policy.cache and policy.activations
    requests, dense = policy.block_size, machine.dense
    rows = dense_batch_of(requests, lengths)
    weights = model_weight_bytes(shape, policy)
    cache = requests * lengths.mean_cached * kv_bytes(shape, policy) * shape.num_layers
    multiplied = sum(part.params * part.count * part.active_share for part in sublayers(shape))
    on_host = 1 - policy.cache[0] if machine.has_device and policy.cpu_attention else 0.0
    times = {
        "memory": (weights + (1 - on_host) * cache) / dense.bandwidth,
        "disk": (policy.weights[2] * weights + policy.cache[2] * cache) / machine.profile.disk.read,
    }
    if machine.has_device:
        copied = (1 - policy.weights[0]) * weights + max(0.0, 1 - policy.cache[0] - on_host) * cache
        times["pcie"] = copied / machine.link.h2d
        times["host"] = on_host * cache / attention_rate(machine.host, policy.kv_bits)
    if between:
        times["network"] = rows * shape.hidden * VALUE_BYTES / between
    return PassTimes(2 * rows * multiplied / max(dense.flops.values()), times)


def dense_batch_of(requests: float, lengths: Lengths) -> float:
    """Rows of a pass in which so many requests decode; the inverse of `requests_of`."""
    return requests * (lengths.prompt + lengths.generated) / (lengths.generated + 1)


def requests_of(dense_batch: float, lengths: Lengths) -> float:
    """Requests that decode in a pass of `dense_batch` rows, if as many end as begin."""
    return dense_batch * (lengths.generated + 1) / (lengths.prompt + lengths.generated)


def operations(shape: ModelShape, lengths: Lengths, dense_batch: int, devices: Devices) -> list[Operation]:
    """The operations of a pass of a LLaMA-like model with tensor parallelism over the devices."""
    layers, hidden = shape.num_layers, shape.hidden
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    decoding = requests_of(dense_batch, lengths)
    prompts = dense_batch - decoding

    def product(name: str, inputs: int, outputs: int, params: int) -> Operation:
        moved = VALUE_BYTES * layers * (params + dense_batch * (inputs + outputs))
        return Operation(name, 2.0 * dense_batch * params * layers, moved)

    cached = VALUE_BYTES * kv_values(shape) * layers
    # an all-reduce after two products a layer: gathered and scattered, to and from every other device
    sent = 4 * dense_batch * hidden * VALUE_BYTES * layers * (devices.count - 1)
    return [
        product("GEMM-KQV", hidden, queries + 2 * keys, hidden * (queries + 2 * keys)),
        product("GEMM-O", queries, hidden, queries * hidden),
        product("GEMM-UG", hidden, 2 * shape.ffn, 2 * hidden * shape.ffn),
        product("GEMM-D", shape.ffn, hidden, hidden * shape.ffn),
        Operation("DecodeAttention", 4 * decoding * lengths.mean_cached * queries * layers,
                  decoding * (lengths.mean_cached * cached + 2 * VALUE_BYTES * queries * layers)),
        Operation("PrefillAttention", 4 * prompts * lengths.prompt * queries * layers,
                  prompts * (cached + 2 * VALUE_BYTES * queries * layers)),
        Operation("Communication", dense_batch * hidden * layers * 2.0 * (devices.count - 1), sent, sent),
    ]  # fmt: skip


def published() -> Iterator[tuple[str, str, float]]:
    """NanoFlow's table 2: operation and limit, its estimate in ms as published, and ours in ms.

    Llama-2-70B on 8 A100 80 GB, 2048 rows a pass, requests of 512 + 1024 tokens.
    """
    devices = Devices(_DEVICES, *_A100)
    llama, lengths = shape("meta-llama/Llama-2-70b-hf"), Lengths(512, 1024)
    estimates = {o.name: o.seconds(devices) for o in operations(llama, lengths, _DENSE_BATCH, devices)}
    for row in published_rows("nanoflow_a100"):
        figures = [row[name] for name in ("t_compute_ms", "t_mem_ms", "t_net_ms")]
        for limit, figure, seconds in zip(_LIMITS, figures, estimates[row["op"]], strict=True):
            if float(figure):
                yield f"{row['op']}, {limit}", figure, 1e3 * seconds


def optimal_tok_s(devices: Devices, params: float) -> float:
    """Prompt and generated tokens per second if arithmetic never waits. Source: equation 5."""
    return devices.count * devices.flops / (2 * params)
