"""NanoFlow's model of serving from device memory: operations of a pass of mixed requests, and the optimal throughput.

Source: NanoFlow (Zhu et al. 2025), section 3 and table 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from engines.models.shapes import shape
from engines.planning.workload import VALUE_BYTES, Lengths, kv_values
from harness.api import ModelShape
from harness.common.published import published_rows

_LIMITS = ("arithmetic", "memory", "network")
#: Of its table 2: A100 80 GB, FLOP/s in float16, bytes/s of memory, and one way over NVLink.
_A100 = (312e12, 2e12, 300e9)
_DEVICES, _DENSE_BATCH = 8, 2048


@dataclass(frozen=True)
class Devices:
    """`count` equal devices: FLOP/s, bytes/s of memory, and bytes/s that each sends to the others."""

    count: int
    flops: float
    bandwidth: float
    network: float


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
