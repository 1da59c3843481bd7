"""Plans of memory, of a host and with a device: what is placed, what a batch computes in, and how shares are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engines.offload.memory.kv_blocks import blocks_for
from engines.offload.memory.layout import WeightTile
from engines.offload.memory.storage import Storage
from harness.api import ModelShape, OffloadPolicy

#: The share of a budget for what the allocator keeps: of a warm-up it kept 38 MB in 1.2 GiB.
KEPT_SHARE = 1 / 32
#: Slots of the ring through which weights stream: enough to keep the disk busy while a pass ends, and the share
#: of a budget that may go to them.
_SLOTS = (4, 16)
_RING_SHARE = 1 / 16
#: The share of a budget for the activations of a pass's prompt tokens, where the policy does not say how many.
_WORK_SHARE = 1 / 8


@dataclass(frozen=True)
class MemoryRequest:
    """What is to be placed: weight tiles, small tensors, the cache, and the lengths of sequences.

    `compute_bytes`: of an activation's value. `cast_bytes`: of the largest copy that is made of a tile before its
    product, 0 where there is none. `cache`: how keys and values are stored. `attention_bytes`: those that attention
    holds beside its operands, and for each prompt row of a pass.

    A sequence has at most `max_sequence` tokens, and `mean_sequence` on average over its life.
    """

    shape: ModelShape
    tiles: Sequence[WeightTile]
    cache: Storage
    compute_bytes: int
    cast_bytes: int
    small_bytes: int
    attention_bytes: tuple[int, int]
    max_sequence: int
    mean_sequence: int

    def blocks(self, sequences: int, sweep: bool) -> int:
        """Blocks that so many sequences need: whole ones of a block, of a sweep one and others of all ages."""
        each = blocks_for(self.max_sequence)
        return max(each, sequences * blocks_for(self.mean_sequence)) if sweep else sequences * each


@dataclass(frozen=True)
class MemoryPlan:
    """Cache blocks in memory and on disk, sequences that run together, resident weight tiles, ring slots, prompt
    tokens a pass.

    `total_bytes` is what all of it takes. `activation_bytes`: of it what a batch computes in, of which a token of a
    pass takes `row_bytes`, and one that meets the head `logits_bytes` beside. With a device its memory is what
    `blocks`, `resident` tiles, slots and activations are in; `host_kv_blocks` and the tiles `pinned` are in pinned host
    memory, of `pinned_bytes` with what passes through.
    """

    kv_blocks: int
    disk_kv_blocks: int
    sequences: int
    resident: frozenset[int]
    slots: int
    chunk: int
    activation_bytes: int
    row_bytes: int
    logits_bytes: int
    total_bytes: int
    note: str
    host_kv_blocks: int = 0
    pinned: frozenset[int] = frozenset()
    pinned_bytes: int = 0

    def chunk_limits(self, scored_share: float) -> tuple[int, int]:
        """Tokens of a batch and pass, and how many of them may meet the head, where such a share of all tokens do."""
        tokens = max(
            3, min(self.chunk, int(self.activation_bytes / (self.row_bytes + scored_share * self.logits_bytes)))
        )
        return tokens, max(3, (self.activation_bytes - tokens * self.row_bytes) // self.logits_bytes)


@dataclass(frozen=True)
class ActivationMemory:
    """What the batches of a pass compute in: of each token `row` bytes, of each that meets the head `logits` beside.

    `attention`: see MemoryRequest. `chunk`: prompt tokens of a batch and pass.
    """

    batches: int
    chunk: int
    row: int
    logits: int
    attention: tuple[int, int]

    @classmethod
    def within(
        cls, budget: int | None, demand: MemoryRequest, policy: OffloadPolicy, chunks: tuple[int, int]
    ) -> ActivationMemory:
        """In a budget (None: no limit), with a chunk between two limits where the policy does not say."""
        shape = demand.shape
        # the residual stream, its norm, queries, keys, values and attention's output, and the feed-forward's input,
        # activation and (gated) product
        row = (8 * shape.hidden + 3 * shape.ffn) * demand.compute_bytes
        rows = None if budget is None else budget * _WORK_SHARE / policy.num_gpu_batches / row
        chunk = min(policy.prefill_chunk or _between(chunks, rows), policy.gpu_batch_size * demand.max_sequence)
        # logits and a copy of them
        return cls(policy.num_gpu_batches, chunk, row, 2 * shape.vocab * 4, demand.attention_bytes)

    def bytes(self, sequences: int) -> int:
        """For so many sequences in all batches."""
        fixed, row = self.attention
        size = -(-sequences // self.batches)
        return self.batches * ((size + self.chunk) * self.row + size * self.logits) + fixed + self.chunk * row


def slots_within(budget: int | None, span: int) -> int:
    """Slots of the ring, of `span` bytes each."""
    return _between(_SLOTS, None if budget is None else budget * _RING_SHARE / span)


def evenly(tiles: Sequence[WeightTile], among: Iterable[int], nbytes: int) -> frozenset[int]:
    """As many tiles `among` some as `nbytes` hold, evenly over the pass, so that the others come at an even pace."""
    places = list(among)
    share = nbytes / max(1, sum(tiles[i].nbytes for i in places))
    chosen, taken, seen = set(), 0, 0
    for i in places:
        tile = tiles[i]
        seen += tile.nbytes
        if taken + tile.nbytes <= share * seen:
            chosen.add(i)
            taken += tile.nbytes
    return frozenset(chosen)


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that `fits`, which is taken to be monotone; 0 if 1 does not."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _between(limits: tuple[int, int], wanted: float | None) -> int:
    """`wanted` between two limits; the upper one where anything goes."""
    low, high = limits
    return high if wanted is None else max(low, min(high, int(wanted)))


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
