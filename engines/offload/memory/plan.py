"""The memory planner's input and output: what a job needs (MemoryRequest) and where all of it goes (MemoryPlan)."""

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from engines.offload.memory.expert_usage import ExpertUsage
from engines.offload.memory.kv_blocks import blocks_for
from engines.offload.memory.layout import WeightTile
from engines.offload.memory.storage import Storage
from harness.api import ModelShape, OffloadPolicy

#: Probabilities that a pass reads a tile are told apart so finely. In classes much smaller than a layer's experts, what
#: streams would not be spread over the pass.
_CLASSES = 32


@dataclass(frozen=True)
class WeightClass:
    """`nbytes` of weights, each of which a pass reads with about the same `probability`."""

    nbytes: float
    probability: float


@dataclass(frozen=True)
class MemoryRequest:
    """What the engine needs memory for.

    shape: the model's sizes.
    tiles: weight tiles in the order in which a pass multiplies them.
    cache: how keys and values are stored.
    compute_bytes: bytes of one activation value.
    cast_bytes: size of the largest temporary copy that a product makes of a tile; 0 if it makes none.
    small_bytes: norms, biases and other tensors that always stay in memory.
    attention_bytes: scratch memory of attention beside its operands: fixed, and per prompt row of a pass.
    max_sequence, mean_sequence: tokens of a sequence, at most and on average over its life.
    usage: how often a pass needs an expert.
    mean_new: tokens that a sequence generates, on average, at least 1.
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
    usage: ExpertUsage = field(default_factory=ExpertUsage)
    mean_new: int = 1

    @property
    def mean_prompt(self) -> int:
        """Tokens of a prompt, on average."""
        return max(1, self.mean_sequence - self.mean_new // 2)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all tiles as they are stored."""
        return sum(tile.nbytes for tile in self.tiles)

    @cached_property
    def largest_tile(self) -> int:
        """Bytes of the largest tile, page-aligned: a slot of the ring."""
        return max(tile.span for tile in self.tiles)

    def weight_classes(self, sequences: int) -> list[WeightClass]:
        """The classes that `hottest` takes tiles from, in its order, in a pass of a token of each sequence."""
        if not self.usage.experts:
            return [WeightClass(self.weight_bytes, 1.0)]
        sums: dict[int, list[float]] = {}
        probabilities = self.usage.read_probabilities(self.tiles, sequences)
        for tile, probability in zip(self.tiles, probabilities, strict=True):
            total = sums.setdefault(round(probability * _CLASSES), [0.0, 0.0])
            total[0] += tile.nbytes
            total[1] += tile.nbytes * probability
        return [WeightClass(nbytes, expected / nbytes) for _, (nbytes, expected) in sorted(sums.items(), reverse=True)]

    def streamed_bytes(self, resident: Collection[int], sequences: int) -> int:
        """Bytes that a pass of a token of each sequence is expected to read of the tiles that are not resident."""
        streamed = [tile for tile in self.tiles if tile.index not in resident]
        return round(self.usage.expected_bytes(streamed, sequences))

    def kv_blocks(self, sequences: int, mixed_ages: bool) -> int:
        """KV blocks for `sequences` at full length; if `mixed_ages`, for one at full length or all at mean length."""
        each = blocks_for(self.max_sequence)
        return max(each, sequences * blocks_for(self.mean_sequence)) if mixed_ages else sequences * each


@dataclass(frozen=True)
class MemoryPlan:
    """Where weights, KV cache and activations go.

    The first tier is the host's memory, or the device's where there is one.

    kv_blocks, host_kv_blocks, disk_kv_blocks: KV blocks in the first tier, in pinned host memory beside a device, and
        on disk.
    sequences: how many run at a time.
    resident: indices of the tiles that stay in the first tier; the others stream through the ring.
    slots: slots of the ring, each as large as the largest tile.
    chunk: prompt tokens of one batch in a pass.
    activation_bytes: activations of one batch; each of its tokens takes `row_bytes`, and `logits_bytes` more if its
        logits are computed.
    total_bytes: all that is planned in the first tier.
    note: the plan in words, for reports.
    tokens_per_s: tokens generated a second by the rates that the plan was made with; 0 without any.
    pinned: indices of the tiles held in pinned host memory; `pinned_bytes` is all of that memory.
    stage_blocks, pinned_stage_blocks: blocks of a stage on a device for those below it, and in pinned memory for those
        on disk.
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
    tokens_per_s: float = 0.0
    host_kv_blocks: int = 0
    stage_blocks: int = 0
    pinned_stage_blocks: int = 0
    pinned: frozenset[int] = frozenset()
    pinned_bytes: int = 0

    def chunk_limits(self, scored_share: float) -> tuple[int, int]:
        """Tokens of a batch in one pass, and how many of them may have logits, if `scored_share` of all tokens do."""
        each = self.row_bytes + scored_share * self.logits_bytes
        tokens = max(3, min(self.chunk, int(self.activation_bytes / each)))
        return tokens, max(3, (self.activation_bytes - tokens * self.row_bytes) // self.logits_bytes)

    def most_logits(self, policy: OffloadPolicy) -> int:
        """Rows of logits of a batch and pass: those planned for a token of each sequence, which log-probabilities of
        prompts share, or what else the memory for activations holds."""
        planned = -(-self.sequences // policy.num_gpu_batches)
        return max(planned, min(policy.gpu_batch_size, self.chunk_limits(1.0)[1]))


def evenly(
    tiles: Sequence[WeightTile], among: Iterable[int], nbytes: int, unit: Callable[[int], Hashable] | None = None
) -> frozenset[int]:
    """Chooses tiles of `among` that fit `nbytes`, spread over the pass so that the rest streams at a steady rate. Tiles
    of one `unit` that follow each other are chosen together; None: each by itself."""
    units: list[Sequence[int]]
    if unit is None:  # a search plans memory thousands of times
        units = [(i,) for i in among]
        sizes = [tiles[i].nbytes for (i,) in units]
    else:
        units = [tuple(alike) for _, alike in itertools.groupby(among, unit)]
        sizes = [sum(tiles[i].nbytes for i in alike) for alike in units]
    share = nbytes / max(1, sum(sizes))
    chosen, taken, seen = set[int](), 0, 0
    for alike, size in zip(units, sizes, strict=True):
        seen += size
        if taken + size <= share * seen:
            chosen.update(alike)
            taken += size
    return frozenset(chosen)


def hottest(
    tiles: Sequence[WeightTile], among: Iterable[int], nbytes: int, probabilities: Sequence[float],
    unit: Callable[[int], Hashable] | None = None,
) -> frozenset[int]:  # fmt: skip
    """Chooses tiles of `among` that fit `nbytes`: first those that a pass reads with the highest of `probabilities`,
    which saves most reads for their bytes. Of tiles that are about as likely they are chosen `evenly`, by `unit`."""
    classes: dict[int, list[int]] = {}
    class_of = {p: round(p * _CLASSES) for p in set(probabilities)}
    for i in among:
        classes.setdefault(class_of[probabilities[i]], []).append(i)
    chosen: frozenset[int] = frozenset()
    for _, alike in sorted(classes.items(), reverse=True):
        more = evenly(tiles, alike, nbytes, unit)
        nbytes -= sum(tiles[i].nbytes for i in more)
        chosen |= more
    return chosen


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number in 1..`most` for which the monotone predicate `fits` holds; 0 if there is none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
