"""Forms passes within the KV cache: what schedulers share, and continuous batching (sweep)."""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Generic, TypeVar

from engines.offload.admission import AverageLength, BlockDemand
from engines.offload.kv_cache.block_hashes import extend_block_hashes
from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.scheduled_chunk import ActiveSequence, Room, ScheduledChunk

S = TypeVar("S", bound=ActiveSequence)


class MustReadError(Exception):
    """A sequence that is due would start with blocks that a store has to be read for."""


class Scheduler(ABC, Generic[S]):
    """Forms passes. `next_pass` allocates the KV blocks of its chunks, `advance` ends it; `finish` frees a sequence's
    blocks. `changes` counts the sequences that came and went: as long as it stays, so does the next pass.

    A sequence whose prefix is cached starts with the cached blocks. `prefix_hit_tokens` counts the prompt tokens that
    this saves, `preemptions` how often a running sequence lost its blocks to an older one. `waiting` sequences are not
    admitted, by arrival. At most `max_logits` rows of logits are computed for a batch and pass. Admission assumes that
    sequences generate their maximum, or an `average`; one that was preempted counts with its maximum from then on.
    """

    def __init__(
        self, waiting: Iterable[S], cache: BlockManager, size: int, max_logits: int | None,
        average: AverageLength | None = None,
    ) -> None:  # fmt: skip
        # a stable sort: sequences that arrive together keep their order
        self.waiting = deque(sorted(waiting, key=lambda s: s.arrival_s))
        #: Admitted sequences, oldest first, and the cached blocks that each was admitted with.
        self.running: dict[S, list[int]] = {}
        self._cache = cache
        self._hashes: dict[S, list[bytes]] = {}  # by sequence, of its leading full blocks so far
        self._size = size
        self._max_logits = max_logits
        self._average = average
        self._preempted: set[S] = set()  # at least once
        self._demand: BlockDemand | None = None  # of the running ones; None where they have changed since
        self.prefix_hit_tokens = self.preemptions = self.changes = 0

    @property
    def next_arrival_s(self) -> float | None:
        """When there is work next: 0 if sequences are running, None if all are done."""
        if self.running:
            return 0.0
        return self.waiting[0].arrival_s if self.waiting else None

    @abstractmethod
    def next_pass(self, now_s: float, ahead: bool = False) -> list[list[ScheduledChunk[S]]]:
        """The batches of the next pass; empty if no sequence has arrived or none gets the blocks it needs. `ahead`: the
        last pass's tokens are not known yet; empty too if a sequence would be preempted, as another may have ended, or
        if a store would be read, which may take longer than the pass that computes meanwhile."""

    def advance(self, chunks: Iterable[ScheduledChunk[S]], now_s: float = math.nan) -> list[S]:
        """The pass of these chunks is computed: later sequences find the blocks that it has filled, and those that have
        taken all their steps are finished. Returns the sequences that generate a token, at `now_s`."""
        self._demand = None
        generating = []
        for chunk in chunks:
            self._cache_full_blocks(chunk)
            if chunk.sequence.advance(chunk.count, now_s):
                generating.append(chunk.sequence)
                if not chunk.sequence.steps_left:
                    self.finish(chunk.sequence)
        return generating

    def submit(self, sequence: S) -> None:
        """Queues a sequence that has arrived, behind those that wait."""
        self.changes += 1
        self.waiting.append(sequence)

    def finish(self, sequence: S) -> None:
        """Removes a sequence that runs or waits and frees its blocks. Idempotent."""
        self.changes += 1
        if self.running.pop(sequence, None) is not None:
            if self._average is not None:
                self._average.observe(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._forget(sequence)
        self._preempted.discard(sequence)

    def close(self) -> None:
        """Frees the blocks of all running sequences."""
        for sequence in list(self.running):
            self.finish(sequence)

    def admit(self, now_s: float, ahead: bool = False) -> S | None:
        """Admits the next arrived sequence if the cache can hold it to its end beside the running sequences. Raises
        MustReadError instead where a pass is formed `ahead`."""
        if not self.waiting or self.waiting[0].arrival_s > now_s:
            return None
        sequence = self.waiting[0]
        hashes = self._hashes.setdefault(sequence, [])
        extend_block_hashes(sequence.tokens, hashes, sequence.cacheable_tokens)
        cacheable = hashes[: sequence.cacheable_tokens // BLOCK_SIZE]
        prefix = self._cache.match_prefix(cacheable)
        if not self._fits(demand := self._demand_with(sequence, prefix)):
            return None
        missing = cacheable[len(prefix) :]
        if ahead and self._cache.may_restore(missing):
            raise MustReadError
        self.waiting.popleft()
        self.running[sequence], self._demand = prefix, demand
        self._cache.ref(prefix)
        sequence.block_table = [*prefix, *self._cache.restore(missing)]
        sequence.cached = len(sequence.block_table) * BLOCK_SIZE
        if sequence.prefix_hit_tokens is None:  # a preempted sequence may find blocks of its first run
            sequence.prefix_hit_tokens = sequence.cached
            self.prefix_hit_tokens += sequence.cached
        return sequence

    def _demand_with(self, sequence: S, prefix: Sequence[int]) -> BlockDemand:
        """That of the running sequences and of one that starts with the blocks `prefix`."""
        if self._demand is None:
            self._demand = BlockDemand([(s, blocks, self._steps_left(s)) for s, blocks in self.running.items()])
        return self._demand.plus(sequence, prefix, self._steps_left(sequence))

    def _fits(self, demand: BlockDemand) -> bool:
        return demand.most_blocks <= self._cache.num_blocks

    def _steps_left(self, sequence: S) -> int:
        guess = None if sequence in self._preempted else self._average
        return sequence.steps_left if guess is None else guess.steps_left(sequence)

    def _allocate_blocks(
        self, batches: Sequence[Sequence[ScheduledChunk[S]]], ahead: bool
    ) -> list[list[ScheduledChunk[S]]]:
        """Allocates blocks for the tokens of each chunk; returns the chunks that can be computed.

        Prompts that take several passes, or sequences longer than the average, can exceed the predicted peak. Then the
        youngest sequences are preempted and recomputed later; the oldest sequence always continues.
        """
        for chunk in chain.from_iterable(batches):
            if chunk.sequence not in self.running:  # preempted for an older sequence
                continue
            missing = chunk.missing_blocks
            while missing > self._cache.num_free_blocks:
                if ahead:
                    return []
                youngest = next(reversed(self.running))
                if youngest is chunk.sequence:
                    break
                self._preempt(youngest)
            if 0 < missing <= self._cache.num_free_blocks:
                chunk.sequence.block_table += self._cache.allocate(missing)
        ready = [[c for c in batch if c.sequence in self.running and c.missing_blocks <= 0] for batch in batches]
        return [batch for batch in ready if batch]

    def _cache_full_blocks(self, chunk: ScheduledChunk[S]) -> None:
        sequence, first, end = chunk.sequence, chunk.cached // BLOCK_SIZE, chunk.cached + chunk.count
        if first == end // BLOCK_SIZE:
            return
        hashes = self._hashes.setdefault(sequence, [])
        extend_block_hashes(sequence.tokens, hashes, end)
        for i in range(first, end // BLOCK_SIZE):
            self._cache.cache_block(sequence.block_table[i], hashes[i])

    def _preempt(self, sequence: S) -> None:
        del self.running[sequence]
        self._forget(sequence)
        self._preempted.add(sequence)
        self.preemptions += 1
        sequence.reset()
        self.waiting.appendleft(sequence)

    def _forget(self, sequence: S) -> None:
        self._demand, hashes = None, self._hashes.pop(sequence, [])
        known = min(len(hashes), sequence.cached // BLOCK_SIZE)
        self._cache.keep(sequence.block_table[:known], hashes[:known])
        self._cache.free(sequence.block_table)
        sequence.block_table = []


class ContinuousScheduler(Scheduler[S]):
    """Continuous batching with chunked prefill: one batch of a token of every sequence that decodes, and of as many
    prompt tokens of the next sequences as `budget` allows beside so many decode rows. At most `size` sequences run.
    """

    def __init__(
        self, waiting: Iterable[S], cache: BlockManager, size: int, budget: Callable[[int], int],
        max_logits: int | None = None, average: AverageLength | None = None,
    ) -> None:  # fmt: skip
        super().__init__(waiting, cache, size, max_logits, average)
        self._budget = budget

    def next_pass(self, now_s: float, ahead: bool = False) -> list[list[ScheduledChunk[S]]]:
        chunks = [ScheduledChunk(s, 1) for s in self.running if s.missing == 1]
        logits = None if self._max_logits is None else max(0, self._max_logits - len(chunks))
        room = Room(self._budget(len(chunks)), logits)
        try:
            for sequence in self._prompts(now_s, ahead):
                if count := room.take(sequence):
                    chunks.append(ScheduledChunk(sequence, count))
                if not count or not room.prompt_rows:
                    break
        except MustReadError:
            return []
        return self._allocate_blocks([chunks], ahead)

    def _prompts(self, now_s: float, ahead: bool) -> Iterable[S]:
        """Sequences whose prompts are not cached: running ones, then new ones as long as they are admitted."""
        yield from [s for s in self.running if s.missing > 1]
        while len(self.running) < self._size and (sequence := self.admit(now_s, ahead)):
            yield sequence
