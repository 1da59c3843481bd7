"""Forms passes within the KV cache: blocks of sequences in step (row, zigzag) or continuous batching (sweep)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, Protocol, TypeVar

import numpy as np

from engines.offload.kv_cache.block_manager import BlockManager, extend_block_hashes
from engines.offload.memory.kv_blocks import BLOCK_SIZE, blocks_for
from harness.api import OffloadPolicy


class Schedulable(Protocol):
    """A sequence as a scheduler sees it; see sequence.ActiveSequence."""

    tokens: list[int]
    cached: int
    block_table: list[int]
    arrival_s: float

    @property
    def steps_left(self) -> int: ...

    @property
    def cacheable_tokens(self) -> int: ...

    def reset(self) -> None: ...

    def logits_positions(self, count: int) -> range: ...


S = TypeVar("S", bound=Schedulable)

#: After this many blocks of requests the start and end of a sweep hardly affect its throughput.
_SWEEP_BLOCKS = 4


def steady_blocks(policy: OffloadPolicy) -> int:
    """How many blocks of requests a measurement needs until its throughput no longer changes."""
    return _SWEEP_BLOCKS if policy.schedule == "sweep" else 1


@dataclass(frozen=True)
class ScheduledChunk(Generic[S]):
    """The part of one sequence that a pass computes: its next `count` tokens that are not cached."""

    sequence: S
    count: int

    @property
    def cached(self) -> int:
        """Tokens of the sequence before these."""
        return self.sequence.cached

    @property
    def block_table(self) -> Sequence[int]:
        """The sequence's KV blocks, in order."""
        return self.sequence.block_table


class Scheduler(ABC, Generic[S]):
    """Forms passes. `next_pass` allocates the KV blocks of its chunks; `finish` frees a sequence's blocks.

    A sequence whose prefix is cached starts with the cached blocks. `shared_tokens` counts the prompt tokens that this
    saves.
    """

    def __init__(self, waiting: Iterable[S], cache: BlockManager) -> None:
        # a stable sort: sequences that arrive together keep their order
        self._waiting = deque(sorted(waiting, key=lambda s: s.arrival_s))
        self._running: dict[S, None] = {}  # in the order of their admission
        self._cache = cache
        self._hashes: dict[S, list[bytes]] = {}  # by sequence, of its leading full blocks so far
        self._shared: dict[S, list[int]] = {}  # by running sequence, the cached blocks it was admitted with
        self._preempted: set[S] = set()
        self.shared_tokens = 0

    @property
    def running(self) -> list[S]:
        """Admitted sequences, oldest first."""
        return list(self._running)

    @property
    def preempted(self) -> int:
        """How many sequences were preempted at least once."""
        return len(self._preempted)

    @property
    def next_arrival_s(self) -> float | None:
        """When there is work next: 0 if sequences are running, None if all are done."""
        if self._running:
            return 0.0
        return self._waiting[0].arrival_s if self._waiting else None

    @property
    def waiting(self) -> int:
        """How many sequences are not admitted."""
        return len(self._waiting)

    @abstractmethod
    def next_pass(self, now_s: float) -> list[list[ScheduledChunk[S]]]:
        """The batches of the next pass; empty if no sequence has arrived or none gets the blocks it needs."""

    def finish(self, sequence: S) -> None:
        """Removes a running sequence and frees its blocks."""
        del self._running[sequence], self._shared[sequence]
        self._hashes.pop(sequence, None)
        self._cache.free(sequence.block_table)
        sequence.block_table = []

    def close(self) -> None:
        """Frees the blocks of all running sequences."""
        for sequence in self.running:
            self.finish(sequence)

    def admit(self, now_s: float) -> S | None:
        """Admits the next arrived sequence if the cache can hold it to its end beside the running sequences."""
        if not self._waiting or self._waiting[0].arrival_s > now_s:
            return None
        sequence = self._waiting[0]
        hashes = self._hashes.setdefault(sequence, [])
        extend_block_hashes(sequence.tokens, hashes, sequence.cacheable_tokens)
        prefix = self._cache.match_prefix(hashes[: sequence.cacheable_tokens // BLOCK_SIZE])
        if not self._fits(sequence, prefix):
            return None
        self._running[self._waiting.popleft()] = None
        self._shared[sequence] = prefix
        self._cache.ref(prefix)
        sequence.block_table, sequence.cached = list(prefix), len(prefix) * BLOCK_SIZE
        if sequence not in self._preempted:  # a preempted sequence may find blocks of its first run
            self.shared_tokens += sequence.cached
        return sequence

    def _fits(self, sequence: S, prefix: Sequence[int]) -> bool:
        """Whether the cache can hold `sequence`, which starts with the blocks `prefix`, beside the running ones."""
        shared = {block for blocks in self._shared.values() for block in blocks} | set(prefix)
        borrowed = [*(len(blocks) for blocks in self._shared.values()), len(prefix)]
        return peak_blocks([*self._running, sequence], borrowed) + len(shared) <= self._cache.num_blocks

    def _allocate_blocks(self, batches: Sequence[Sequence[ScheduledChunk[S]]]) -> list[list[ScheduledChunk[S]]]:
        """Allocates blocks for the tokens of each chunk; returns the chunks that can be computed.

        A prompt that takes several passes can exceed the predicted peak. Then the youngest sequences are preempted and
        recomputed later; the oldest sequence always continues.
        """
        for chunk in chain.from_iterable(batches):
            if chunk.sequence not in self._running:  # preempted for an older sequence
                continue
            missing = blocks_for(chunk.cached + chunk.count) - len(chunk.block_table)
            if missing <= 0:
                continue
            while missing > self._cache.num_free_blocks:
                youngest = next(reversed(self._running))
                if youngest is chunk.sequence:
                    break
                self._preempt(youngest)
            if missing <= self._cache.num_free_blocks:
                chunk.sequence.block_table += self._cache.allocate(missing)
        ready = [[c for c in batch if c.sequence in self._running and _has_blocks(c)] for batch in batches]
        for chunk in chain.from_iterable(ready):
            self._cache_full_blocks(chunk)
        return [batch for batch in ready if batch]

    def _cache_full_blocks(self, chunk: ScheduledChunk[S]) -> None:
        """Lets later sequences find the blocks that this pass fills."""
        sequence, first, end = chunk.sequence, chunk.cached // BLOCK_SIZE, chunk.cached + chunk.count
        if first == end // BLOCK_SIZE:
            return
        hashes = self._hashes.setdefault(sequence, [])
        extend_block_hashes(sequence.tokens, hashes, end)
        for i in range(first, end // BLOCK_SIZE):
            self._cache.cache_block(sequence.block_table[i], hashes[i])

    def _preempt(self, sequence: S) -> None:
        self.finish(sequence)
        self._preempted.add(sequence)
        sequence.reset()
        self._waiting.appendleft(sequence)


class BlockScheduler(Scheduler[S]):
    """Blocks of `batches` x `size` sequences that start together; the next block starts when all of one have ended.

    A batch and pass compute at most `prefill_chunk` prompt tokens and, if given, `max_logits` rows of logits.
    """

    def __init__(
        self,
        waiting: Iterable[S],
        cache: BlockManager,
        size: int,
        batches: int,
        prefill_chunk: int,
        max_logits: int | None = None,
    ) -> None:
        super().__init__(waiting, cache)
        self._max_logits = max_logits
        self._size = size
        self._batches = batches
        self._prefill_chunk = prefill_chunk
        self._block: list[list[S]] = []

    def next_pass(self, now_s: float) -> list[list[ScheduledChunk[S]]]:
        if not self._running:
            while len(self._running) < self._size * self._batches and self.admit(now_s):
                pass
            running = self.running
            self._block = [running[i : i + self._size] for i in range(0, len(running), self._size)]
        alive = [[s for s in batch if s in self._running] for batch in self._block]
        return self._allocate_blocks([self._chunks(batch) for batch in alive])

    def _chunks(self, batch: Sequence[S]) -> list[ScheduledChunk[S]]:
        """A token of each sequence that decodes, and up to `prefill_chunk` prompt tokens of the others."""
        chunks = []
        left, max_logits = self._prefill_chunk, self._max_logits
        for sequence in batch:
            missing = len(sequence.tokens) - sequence.cached
            count = 1 if missing == 1 else prompt_rows(missing, left, self._prefill_chunk)
            count, max_logits = _within_logits(sequence, count, max_logits)
            left -= count if missing > 1 else 0
            if count:
                chunks.append(ScheduledChunk(sequence, count))
        return chunks


class ContinuousScheduler(Scheduler[S]):
    """Continuous batching with chunked prefill: one batch of a token of every sequence that decodes, and of as many
    prompt tokens of the next sequences as `budget` allows. At most `size` sequences run.
    """

    def __init__(
        self,
        waiting: Iterable[S],
        cache: BlockManager,
        size: int,
        budget: PrefillBudget,
        max_logits: int | None = None,
    ) -> None:
        super().__init__(waiting, cache)
        self._max_logits = max_logits
        self._size = size
        self._budget = budget

    def next_pass(self, now_s: float) -> list[list[ScheduledChunk[S]]]:
        chunks = [ScheduledChunk(s, 1) for s in self._running if len(s.tokens) - s.cached == 1]
        left = budget = self._budget(len(chunks))
        max_logits = self._max_logits
        for sequence in self._prompts(now_s):
            count = prompt_rows(len(sequence.tokens) - sequence.cached, left, budget)
            count, max_logits = _within_logits(sequence, count, max_logits)
            if not count:
                break
            chunks.append(ScheduledChunk(sequence, count))
            left -= count
            if not left:
                break
        return self._allocate_blocks([chunks])

    def _prompts(self, now_s: float) -> Iterable[S]:
        """Sequences whose prompts are not cached: running ones, then new ones as long as they are admitted."""
        yield from [s for s in self._running if len(s.tokens) - s.cached > 1]
        while len(self._running) < self._size and (sequence := self.admit(now_s)):
            yield sequence


@dataclass(frozen=True)
class PrefillBudget:
    """How many prompt tokens go into a pass of a sweep.

    `steady`: the tokens that keep the number of running sequences constant, as each that ends makes room for the next.
    `balance`: the rows up to which prompts fill a pass beyond that, since fewer rows would take no less time. `most`:
    the tokens that memory allows.
    """

    steady: int
    balance: int
    most: int

    def __call__(self, decoding: int) -> int:
        """Prompt tokens of a pass with `decoding` decode rows."""
        return max(1, min(self.most, max(self.steady, self.balance - decoding)))


def split(batch: Sequence[ScheduledChunk[S]], count: int) -> list[list[ScheduledChunk[S]]]:
    """Splits a batch into at most `count` nano-batches with similar numbers of rows, in order."""
    count = min(count, len(batch))
    total, rows = sum(chunk.count for chunk in batch), 0
    nano_batches: list[list[ScheduledChunk[S]]] = [[] for _ in range(count)]
    for chunk in batch:
        nano_batches[min(count - 1, count * (2 * rows + chunk.count) // (2 * total))].append(chunk)
        rows += chunk.count
    return [chunks for chunks in nano_batches if chunks]


def prompt_rows(missing: int, left: int, budget: int) -> int:
    """How many of a prompt's `missing` rows go into a pass with room for `left` of its `budget` of prompt rows.

    Avoids single rows if it can: attention of a single row sums in another order, and a result must not depend on the
    other sequences of the pass.
    """
    if missing <= left or budget < 3:
        return min(left, missing)
    count = left - (missing == left + 1)
    return count if count > 1 else 0


def _within_logits(sequence: Schedulable, count: int, max_logits: int | None) -> tuple[int, int | None]:
    """How many of a sequence's next `count` tokens fit within `max_logits` rows of logits, and the rows left after
    them. Avoids single rows of a prompt, as `prompt_rows` does."""
    if max_logits is None:
        return count, None
    missing = len(sequence.tokens) - sequence.cached
    fitting = max(0, count - max(0, len(sequence.logits_positions(count)) - max_logits))
    if fitting < count and missing - fitting == 1:
        fitting -= 1
    if fitting == 1 < missing:
        fitting = 0
    return fitting, max_logits - len(sequence.logits_positions(fitting))


def peak_blocks(sequences: Sequence[Schedulable], shared: Sequence[int] = ()) -> int:
    """The most blocks that `sequences` will hold at once, if none ends early and each adds one token per pass.

    The `shared` blocks of each sequence are not counted. The total falls only when a sequence ends, so its maximum is
    just before an end. Source: NanoFlow (Zhu et al. 2025), section 4 (admission by predicted peak), here computed
    exactly instead of from averages.
    """
    steps = np.array([s.steps_left for s in sequences])
    tokens = np.array([max(s.cached, len(s.tokens)) for s in sequences])
    ends = np.unique(steps)
    held = tokens[None, :] + ends[:, None] - 1  # at its last step a sequence has steps - 1 tokens more
    unshared = -(-held // BLOCK_SIZE) - (np.array(shared, dtype=int) if len(shared) else 0)
    blocks = unshared * (steps[None, :] >= ends[:, None])
    return int(blocks.sum(axis=1).max())


def _has_blocks(chunk: ScheduledChunk[S]) -> bool:
    return blocks_for(chunk.cached + chunk.count) <= len(chunk.block_table)
