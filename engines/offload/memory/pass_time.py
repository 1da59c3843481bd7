"""How fast a job goes under a memory plan, by rates of the machine: what placements and weight formats compete in."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from engines.offload.memory.kv_blocks import BLOCK_SIZE, kv_block_bytes
from engines.offload.memory.plan import MemoryRequest
from harness.api import ModelShape, OffloadPolicy

#: Rows of a product that runs at the full rate.
_MANY_ROWS = 1024
#: Where keys and values are if nothing else is said: in host memory, which is the first tier without a device.
_IN_MEMORY = (0.0, 1.0, 0.0)


@dataclass(frozen=True)
class LinkRates:
    """Bytes/s that are copied `up` to a device and `down` from it, and `attended`: bytes/s of keys and values in host
    memory that the host attends to beside it."""

    up: float
    down: float
    attended: float


@dataclass(frozen=True)
class PassRates:
    """What a pass can count on.

    disk: bytes/s that arrive, in reads of `read_bytes` bytes; larger reads are hardly faster.
    value_s: seconds that one weight value takes in products of so many rows, unpacking included.
    memory: bytes/s of keys and values that attention reads, where products are computed.
    write: bytes/s that the disk takes.
    link: with a device behind a link; None without.
    wait_s: seconds that a pass waits for other ranks' links, whatever it does.
    """

    disk: float
    read_bytes: int
    value_s: Callable[[float], float]
    memory: float
    write: float = math.inf
    link: LinkRates | None = None
    wait_s: float = 0.0


@dataclass(frozen=True)
class PassTime:
    """Seconds of a pass: of all its arithmetic, of attention in one layer, of the disk, of copies to a device and from
    it, and of attention by the host beside products of a device."""

    compute_s: float
    attention_s: float
    disk_s: float
    up_s: float = 0.0
    down_s: float = 0.0
    host_s: float = 0.0

    def seconds(self, overlap: bool) -> float:
        lanes = (self.compute_s, self.disk_s, self.up_s, self.down_s, self.host_s)
        return max(lanes) if overlap else sum(lanes)


@dataclass(frozen=True)
class Traffic:
    """What a pass moves by where things lie: bytes of weights that it is expected to read from disk (`streamed`) and to
    copy to a device (`copied`), and the fractions of the KV cache on device, host and disk."""

    streamed: float
    copied: float = 0.0
    cache: tuple[float, float, float] = _IN_MEMORY


@dataclass(frozen=True)
class JobPasses:
    """A job under a policy, as its passes see it: `sequences` that run at a time, `chunk` prompt tokens of a batch in a
    pass, `streamed_bytes` of weights on disk."""

    request: MemoryRequest
    policy: OffloadPolicy
    rates: PassRates
    sequences: int
    chunk: int
    streamed_bytes: int

    def tokens_per_s(self) -> float:
        """Generated tokens a second in a steady state; a sequence that generates none counts as one token."""
        return self.generated / self.job_seconds(self._traffic)

    def decode_pass(self) -> PassTime:
        """The time of a pass of one token of every sequence."""
        compute, attention = self._arithmetic(self.sequences, self.sequences)
        return self._time(compute, attention, self.sequences, self._traffic)

    def job_seconds(self, traffic: Traffic) -> float:
        """Seconds in which `generated` tokens are generated. Convex in the traffic: each pass takes as long as its
        slowest resource, or all of them together."""
        overlap = self.policy.overlap
        return sum(
            count * (self._time(compute, attention, rows, traffic).seconds(overlap) + self.rates.wait_s)
            for count, rows, compute, attention in self._passes
        )

    @cached_property
    def generated(self) -> float:
        """Tokens that the passes of `job_seconds` generate."""
        if self.policy.schedule == "sweep":
            # as many prompt tokens as keep the number of sequences constant, if the chunk has room for them
            return min(self.sequences, self.chunk * self.request.mean_new / self.request.mean_prompt)
        return self.sequences * self.request.mean_new

    @cached_property
    def _traffic(self) -> Traffic:
        return Traffic(self.streamed_bytes, cache=self.policy.cache or _IN_MEMORY)

    @cached_property
    def _passes(self) -> list[tuple[float, float, float, float]]:
        """A steady pass of a sweep, or all passes of a block: how many there are of a kind, their rows, and the seconds
        of their products and of attention to their own rows in a layer."""
        new, prompt = self.request.mean_new, self.request.mean_prompt
        if self.policy.schedule == "sweep":
            kinds = [(1, self.generated * (prompt + new - 1) / new, self.generated)]
        else:
            size = -(-self.sequences // self.policy.num_gpu_batches)
            prefills = -(-size * prompt // self.chunk)
            kinds = [
                (prefills, self.sequences * prompt / prefills, self.sequences / prefills),
                (new - 1, float(self.sequences), float(self.sequences)),
            ]
        return [(count, rows, *self._arithmetic(rows, logits)) for count, rows, logits in kinds]

    def _arithmetic(self, rows: float, logits: float) -> tuple[float, float]:
        """Seconds of all products of `rows` rows, `logits` of which reach the head, and of a layer's attention without
        the reading of keys and values."""
        request, rates, shape = self.request, self.rates, self.request.shape
        pairs = 4 * rows * request.mean_sequence * shape.num_heads * shape.head_dim  # operations of a layer's attention
        return _products_s(shape, rates.value_s, rows, logits), pairs * rates.value_s(_MANY_ROWS) / (2 * _MANY_ROWS)

    @cached_property
    def _token_bytes(self) -> float:
        """Stored bytes of a token's keys and values in all layers."""
        return kv_block_bytes(self.request.shape, self.request.cache) / BLOCK_SIZE

    def _time(self, products: float, attention: float, rows: float, traffic: Traffic) -> PassTime:
        """A pass of `rows` rows whose arithmetic takes so long."""
        rates, layers = self.rates, self.request.shape.num_layers
        _, host, disk = traffic.cache
        cached = self.sequences * self.request.mean_sequence * self._token_bytes
        new = rows * self._token_bytes
        disk_s = (traffic.streamed + disk * cached) / rates.disk + disk * new / rates.write
        link, below = rates.link, host + disk
        if link is None:
            attention += cached / layers / rates.memory
            return PassTime(products + attention * layers, attention, disk_s)
        on_host = below if self.policy.cpu_attention else 0.0
        attention += (1 - on_host) * cached / layers / rates.memory
        compute, attending = products + attention * layers, on_host * cached / link.attended
        if not self.policy.has_batch_beside:  # the device waits while the host attends
            compute, attending = compute + attending, 0.0
        up_s = (traffic.copied + (below - on_host) * cached) / link.up
        return PassTime(compute, attention, disk_s, up_s, below * new / link.down, attending)


def _products_s(shape: ModelShape, value_s: Callable[[float], float], rows: float, logits: float) -> float:
    """Seconds of all products of a pass; each expert multiplies its share of the rows."""
    experts = shape.forward_stored * value_s(rows * shape.forward_params / shape.forward_stored)
    return shape.num_layers * (shape.attention_params * value_s(rows) + experts) + shape.head_params * value_s(logits)
