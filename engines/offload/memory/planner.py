"""What the planners of host and device memory share: fixed costs, the search for the batch that fits, its refusal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from engines.common.work_memory import SLACK_BYTES
from engines.offload.memory.plan import MemoryPlan, MemoryRequest, largest, mib
from harness.api import InfeasibleError, OffloadPolicy

#: Share of a budget left to the allocator, which keeps freed memory: 38 MB of 1.2 GiB after a warm-up.
_ALLOCATOR_SHARE = 1 / 32
#: Slots of the ring, least and most: enough to keep the disk busy while a pass ends. And their share of a budget.
_SLOTS = (4, 16)
_RING_SHARE = 1 / 16
#: The same of a ring that holds whole layers.
_AHEAD_SHARE = 1 / 4
#: Share of a budget for the activations of a pass's prompt tokens, if the policy sets no chunk.
_ACTIVATION_SHARE = 1 / 8
#: Numbers of sequences of a sweep that are compared are so far apart.
_STEP = 1.1


@dataclass(frozen=True)
class ActivationMemory:
    """Activations of a pass of `batches` batches with `chunk` prompt tokens each.

    Every token takes `row_bytes`, and `logits_bytes` more if its logits are computed. `attention_bytes` is as in
    MemoryRequest.
    """

    batches: int
    chunk: int
    row_bytes: int
    logits_bytes: int
    attention_bytes: tuple[int, int]

    @classmethod
    def within(
        cls, budget: int | None, request: MemoryRequest, policy: OffloadPolicy, chunk_limits: tuple[int, int]
    ) -> ActivationMemory:
        """For a budget in bytes (None: unlimited). `chunk_limits` bound the chunk where the policy does not set it."""
        shape = request.shape
        # the residual stream, its norm, queries, keys, values and attention's output, and the feed-forward's input,
        # activation and (gated) product
        row = (8 * shape.hidden + 3 * shape.ffn) * request.compute_bytes
        rows = None if budget is None else budget * _ACTIVATION_SHARE / policy.num_gpu_batches / row
        chunk = min(policy.prefill_chunk or _clamp(rows, chunk_limits), policy.gpu_batch_size * request.max_sequence)
        # float32 logits and a copy of them
        return cls(policy.num_gpu_batches, chunk, row, 2 * shape.vocab * 4, request.attention_bytes)

    def bytes(self, sequences: int) -> int:
        """Bytes for so many sequences in all batches together."""
        fixed, row = self.attention_bytes
        size = -(-sequences // self.batches)
        tokens = (size + self.chunk) * self.row_bytes
        return self.batches * (tokens + size * self.logits_bytes) + fixed + self.chunk * row


class MemoryPlanner(ABC):
    """Plans one job within `budget` bytes of its first tier (None: unlimited).

    `row` and `zigzag` fit whole blocks of sequences at full length or refuse. `sweep` runs sequences of mixed ages and
    takes as many as fit, up to its batch size. `slots`: of the ring; None for as many as a budget may give it.
    `layers_ahead`: see most_slots.
    """

    def __init__(
        self, request: MemoryRequest, policy: OffloadPolicy, budget: int | None, chunk_limits: tuple[int, int],
        slots: int | None = None, layers_ahead: int = 0,
    ) -> None:  # fmt: skip
        self._request = request
        self._policy = policy
        self._mixed_ages = policy.schedule == "sweep"
        most = most_slots(request, budget, layers_ahead)
        self._slots = most if slots is None else min(most, slots)
        self._ring = self._slots * request.largest_tile
        limits = _with_expert_rows(chunk_limits, request, policy)
        self._activations = ActivationMemory.within(budget, request, policy, limits)
        allocator = int((budget or 0) * _ALLOCATOR_SHARE)
        self._other = request.small_bytes + request.cast_bytes + SLACK_BYTES + allocator

    @abstractmethod
    def plan(self) -> MemoryPlan:
        """The plan. Raises InfeasibleError with the missing bytes by tier."""

    @abstractmethod
    def _fits(self, sequences: int) -> bool:
        """Whether so many sequences can run at a time."""

    @abstractmethod
    def _refusal(self, fewest: int) -> InfeasibleError:
        """Says by how much `fewest` sequences, without which nothing runs, exceed the limits."""

    def _most_sequences(self) -> int:
        """How many sequences to run at a time. Raises InfeasibleError if that is too few for the schedule."""
        fewest = 1 if self._mixed_ages else self._policy.block_size
        sequences = largest(self._policy.block_size, self._fits)
        if sequences < fewest:
            raise self._refusal(fewest)
        return sequences

    def _read_probabilities(self, sequences: int) -> list[float]:
        """Of each tile, the probability that a pass of a token of each sequence needs it."""
        return self._request.usage.read_probabilities(self._request.tiles, sequences)

    def _hint(self, otherwise: str, fixed_weights: bool) -> str:
        """The nearest batch size that fits, or `otherwise`. `fixed_weights`: the policy sets how many are held."""
        batches = self._policy.num_gpu_batches
        size = 0 if self._mixed_ages else largest(self._policy.gpu_batch_size, lambda n: self._fits(n * batches))
        hint = f"gpu_batch_size {size} would fit" if size else otherwise
        return hint + (", or hold a smaller part of the weights (policy.weights)" if fixed_weights else "")


def most_slots(request: MemoryRequest, budget: int | None, layers_ahead: int = 0) -> int:
    """Slots of the largest ring within a budget in bytes (None: unlimited), for the tiles of so many layers where a
    larger share of it has room for them."""
    slots = _clamp(None if budget is None else budget * _RING_SHARE / request.largest_tile, _SLOTS)
    if not layers_ahead:
        return slots
    layer = max(Counter(tile.file for tile in request.tiles).values())
    room = layers_ahead * layer if budget is None else int(budget * _AHEAD_SHARE / request.largest_tile)
    return max(slots, min(layers_ahead * layer, room))


def _with_expert_rows(limits: tuple[int, int], request: MemoryRequest, policy: OffloadPolicy) -> tuple[int, int]:
    """The limits of a chunk in which an expert of a sweep gets the rows that a dense model's matrix gets.

    A pass of a mixture has to read all experts, for each of which it has a fraction of its rows. So it takes as many
    prompt tokens as keep all sequences running, each of which makes room for the next prompt when it ends; more would
    only take memory from weights.
    """
    least, most = limits
    if policy.schedule != "sweep":
        return limits
    steady = round(policy.gpu_batch_size * request.mean_prompt / request.mean_new)
    return least, max(most, min(int(most / request.usage.share), steady))


def fewer_sequences(most: int) -> list[int]:
    """`most` sequences and ever fewer, down to one: those of a sweep that are compared."""
    counts = [most]
    while counts[-1] > 1:
        counts.append(min(counts[-1] - 1, int(counts[-1] / _STEP)))
    return counts


def summed(parts: Mapping[str, int]) -> str:
    """Parts of a tier as a sum in words, such as `cache 12 MiB + ring 8 MiB`."""
    return " + ".join(f"{name} {mib(nbytes)}" for name, nbytes in parts.items())


def _clamp(value: float | None, limits: tuple[int, int]) -> int:
    """`value` within two limits; the upper one for None."""
    low, high = limits
    return high if value is None else max(low, min(high, int(value)))
