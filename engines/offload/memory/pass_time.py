"""How fast a job goes under a memory plan, by rates of the machine: what placements and weight formats compete in."""

from collections.abc import Callable
from dataclasses import dataclass

from engines.offload.memory.kv_blocks import BLOCK_SIZE, kv_block_bytes
from engines.offload.memory.plan import MemoryRequest
from harness.api import ModelShape, OffloadPolicy

#: Rows of a product that runs at the full rate.
_MANY_ROWS = 1024


@dataclass(frozen=True)
class PassRates:
    """What a pass can count on.

    disk: bytes/s that arrive, in reads of `read_bytes` bytes; larger reads are hardly faster.
    value_s: seconds that one weight value takes in products of so many rows, unpacking included.
    memory: bytes/s of keys and values that attention reads.
    """

    disk: float
    read_bytes: int
    value_s: Callable[[float], float]
    memory: float


@dataclass(frozen=True)
class PassTime:
    """Seconds of a pass: of all its arithmetic, of attention in one layer, and of reading from disk."""

    compute_s: float
    attention_s: float
    disk_s: float

    def seconds(self, overlap: bool) -> float:
        return max(self.compute_s, self.disk_s) if overlap else self.compute_s + self.disk_s


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
        new, prompt = self.request.mean_new, self.request.mean_prompt
        if self.policy.schedule == "sweep":
            # as many prompt tokens as keep the number of sequences constant, if the chunk has room for them
            tokens = min(self.sequences, self.chunk * new / prompt)
            return tokens / self._seconds(tokens * (prompt + new - 1) / new, tokens)
        size = -(-self.sequences // self.policy.num_gpu_batches)
        prefills = -(-size * prompt // self.chunk)
        first = prefills * self._seconds(self.sequences * prompt / prefills, self.sequences / prefills)
        return self.sequences * new / (first + (new - 1) * self._seconds(self.sequences, self.sequences))

    def decode_pass(self) -> PassTime:
        """The time of a pass of one token of every sequence."""
        return self._pass(self.sequences, self.sequences)

    def _seconds(self, rows: float, logits: float) -> float:
        return self._pass(rows, logits).seconds(self.policy.overlap)

    def _pass(self, rows: float, logits: float) -> PassTime:
        """A pass of `rows` rows, `logits` of which reach the head."""
        request, rates, shape = self.request, self.rates, self.request.shape
        cached = self.sequences * request.mean_sequence / BLOCK_SIZE * kv_block_bytes(shape, request.cache)
        pairs = 4 * rows * request.mean_sequence * shape.num_heads * shape.head_dim  # operations of a layer's attention
        attention = pairs * rates.value_s(_MANY_ROWS) / (2 * _MANY_ROWS) + cached / shape.num_layers / rates.memory
        on_disk = self.policy.cache[2] * cached if self.policy.cache else 0.0
        compute = _products_s(shape, rates.value_s, rows, logits) + attention * shape.num_layers
        return PassTime(compute, attention, (self.streamed_bytes + on_disk) / rates.disk)


def _products_s(shape: ModelShape, value_s: Callable[[float], float], rows: float, logits: float) -> float:
    """Seconds of all products of a pass; each expert multiplies its share of the rows."""
    experts = shape.forward_stored * value_s(rows * shape.forward_params / shape.forward_stored)
    return shape.num_layers * (shape.attention_params * value_s(rows) + experts) + shape.head_params * value_s(logits)
