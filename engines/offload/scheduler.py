"""Forms passes within the KV cache: blocks of sequences in step (row, zigzag) or continuous batching (sweep)."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

import numpy as np

from engines.offload.kv_cache.block_manager import BlockManager, extend_block_hashes
from engines.offload.memory.kv_blocks import BLOCK_SIZE, blocks_for
from harness.api import OffloadPolicy


class ActiveSequence:
    """Known tokens, the first `cached` of which have keys and values in the KV blocks of `block_table`.

    It generates up to `steps` tokens, one in each pass that reaches its last known token, at `times`.
    """

    def __init__(self, tokens: Sequence[int], steps: int, arrival_s: float = 0.0) -> None:
        self.tokens = list(tokens)
        self.cached = 0
        self.block_table: list[int] = []
        self.arrival_s = arrival_s
        self.start_s = -1.0
        self.times: list[float] = []
        self._steps = steps

    @property
    def missing(self) -> int:
        """How many of its known tokens are not cached."""
        return len(self.tokens) - self.cached

    @property
    def steps_left(self) -> int:
        """How many passes it still needs at most, counted from the one that computes its last known token."""
        return self._steps - len(self.times)

    @property
    def cacheable_tokens(self) -> int:
        """How many of its first tokens may be taken from another sequence's cached blocks. The last token gives the
        next, and no row is computed alone: see `prompt_rows`."""
        return max(0, len(self.tokens) - 2)

    def reset(self) -> None:
        """After preemption: all known tokens, generated ones too, will be computed again."""
        self.cached = 0

    def logits_positions(self, count: int) -> range:
        """The positions among the next `count` tokens that need logits: the last known token's, if it is reached."""
        end = self.cached + count
        return range(end - 1, end) if end == len(self.tokens) else range(0)


S = TypeVar("S", bound=ActiveSequence)


def steady_blocks(policy: OffloadPolicy) -> int:
    """How many blocks of requests a measurement needs until its throughput no longer changes: after four the start and
    end of a sweep hardly affect it."""
    return 4 if policy.schedule == "sweep" else 1


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

    @property
    def missing_blocks(self) -> int:
        """KV blocks that the sequence lacks for these tokens."""
        return blocks_for(self.cached + self.count) - len(self.block_table)


class Scheduler(ABC, Generic[S]):
    """Forms passes. `next_pass` allocates the KV blocks of its chunks; `finish` frees a sequence's blocks.

    A sequence whose prefix is cached starts with the cached blocks. `shared_tokens` counts the prompt tokens that this
    saves. `waiting` sequences are not admitted, by arrival; `preempted` ones were preempted at least once. At most
    `max_logits` rows of logits are computed for a batch and pass.
    """

    def __init__(self, waiting: Iterable[S], cache: BlockManager, size: int, max_logits: int | None) -> None:
        # a stable sort: sequences that arrive together keep their order
        self.waiting = deque(sorted(waiting, key=lambda s: s.arrival_s))
        #: Admitted sequences, oldest first, and the cached blocks that each was admitted with.
        self.running: dict[S, list[int]] = {}
        self._cache = cache
        self._hashes: dict[S, list[bytes]] = {}  # by sequence, of its leading full blocks so far
        self._size = size
        self._max_logits = max_logits
        self.preempted: set[S] = set()
        self.shared_tokens = 0

    @property
    def next_arrival_s(self) -> float | None:
        """When there is work next: 0 if sequences are running, None if all are done."""
        if self.running:
            return 0.0
        return self.waiting[0].arrival_s if self.waiting else None

    @abstractmethod
    def next_pass(self, now_s: float) -> list[list[ScheduledChunk[S]]]:
        """The batches of the next pass; empty if no sequence has arrived or none gets the blocks it needs."""

    def finish(self, sequence: S) -> None:
        """Removes a running sequence and frees its blocks."""
        del self.running[sequence]
        self._hashes.pop(sequence, None)
        self._cache.free(sequence.block_table)
        sequence.block_table = []

    def close(self) -> None:
        """Frees the blocks of all running sequences."""
        for sequence in list(self.running):
            self.finish(sequence)

    def admit(self, now_s: float) -> S | None:
        """Admits the next arrived sequence if the cache can hold it to its end beside the running sequences."""
        if not self.waiting or self.waiting[0].arrival_s > now_s:
            return None
        sequence = self.waiting[0]
        hashes = self._hashes.setdefault(sequence, [])
        extend_block_hashes(sequence.tokens, hashes, sequence.cacheable_tokens)
        prefix = self._cache.match_prefix(hashes[: sequence.cacheable_tokens // BLOCK_SIZE])
        if not self._fits(sequence, prefix):
            return None
        self.running[self.waiting.popleft()] = prefix
        self._cache.ref(prefix)
        sequence.block_table, sequence.cached = list(prefix), len(prefix) * BLOCK_SIZE
        if sequence not in self.preempted:  # a preempted sequence may find blocks of its first run
            self.shared_tokens += sequence.cached
        return sequence

    def _fits(self, sequence: S, prefix: Sequence[int]) -> bool:
        """Whether the cache can hold `sequence`, which starts with the blocks `prefix`, beside the running ones."""
        prefixes = [*self.running.values(), prefix]
        peak = peak_blocks([*self.running, sequence], [len(blocks) for blocks in prefixes])
        return peak + len(set(chain.from_iterable(prefixes))) <= self._cache.num_blocks

    def _allocate_blocks(self, batches: Sequence[Sequence[ScheduledChunk[S]]]) -> list[list[ScheduledChunk[S]]]:
        """Allocates blocks for the tokens of each chunk; returns the chunks that can be computed.

        A prompt that takes several passes can exceed the predicted peak. Then the youngest sequences are preempted and
        recomputed later; the oldest sequence always continues.
        """
        for chunk in chain.from_iterable(batches):
            if chunk.sequence not in self.running:  # preempted for an older sequence
                continue
            missing = chunk.missing_blocks
            while missing > self._cache.num_free_blocks:
                youngest = next(reversed(self.running))
                if youngest is chunk.sequence:
                    break
                self._preempt(youngest)
            if 0 < missing <= self._cache.num_free_blocks:
                chunk.sequence.block_table += self._cache.allocate(missing)
        ready = [[c for c in batch if c.sequence in self.running and c.missing_blocks <= 0] for batch in batches]
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
        self.preempted.add(sequence)
        sequence.reset()
        self.waiting.appendleft(sequence)


class BlockScheduler(Scheduler[S]):
    """Blocks of `batches` x `size` sequences that start together; the next block starts when all of one have ended.

    A batch and pass compute at most `prefill_chunk` prompt tokens.
    """

    def __init__(
        self, waiting: Iterable[S], cache: BlockManager, size: int, batches: int, prefill_chunk: int,
        max_logits: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(waiting, cache, size, max_logits)
        self._batches = batches
        self._prefill_chunk = prefill_chunk
        self._block: list[list[S]] = []

    def next_pass(self, now_s: float) -> list[list[ScheduledChunk[S]]]:
        if not self.running:
            while len(self.running) < self._size * self._batches and self.admit(now_s):
                pass
            running = list(self.running)
            self._block = [running[i : i + self._size] for i in range(0, len(running), self._size)]
        alive = [[s for s in batch if s in self.running] for batch in self._block]
        return self._allocate_blocks([self._chunks(batch) for batch in alive])

    def _chunks(self, batch: Sequence[S]) -> list[ScheduledChunk[S]]:
        """A token of each sequence that decodes, and up to `prefill_chunk` prompt tokens of the others."""
        room = _Room(self._prefill_chunk, self._max_logits)
        counts = [room.take(sequence, decodes=sequence.missing == 1) for sequence in batch]
        return [ScheduledChunk(sequence, count) for sequence, count in zip(batch, counts, strict=True) if count]


class ContinuousScheduler(Scheduler[S]):
    """Continuous batching with chunked prefill: one batch of a token of every sequence that decodes, and of as many
    prompt tokens of the next sequences as `budget` allows beside so many decode rows. At most `size` sequences run.
    """

    def __init__(
        self, waiting: Iterable[S], cache: BlockManager, size: int, budget: Callable[[int], int],
        max_logits: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(waiting, cache, size, max_logits)
        self._budget = budget

    def next_pass(self, now_s: float) -> list[list[ScheduledChunk[S]]]:
        chunks = [ScheduledChunk(s, 1) for s in self.running if s.missing == 1]
        room = _Room(self._budget(len(chunks)), self._max_logits)
        for sequence in self._prompts(now_s):
            if count := room.take(sequence):
                chunks.append(ScheduledChunk(sequence, count))
            if not count or not room.prompt_rows:
                break
        return self._allocate_blocks([chunks])

    def _prompts(self, now_s: float) -> Iterable[S]:
        """Sequences whose prompts are not cached: running ones, then new ones as long as they are admitted."""
        yield from [s for s in self.running if s.missing > 1]
        while len(self.running) < self._size and (sequence := self.admit(now_s)):
            yield sequence


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


class _Room:
    """The rows of prompts and of logits (None: any number) that a batch may still take."""

    def __init__(self, budget: int, logits: int | None) -> None:
        self._budget = self.prompt_rows = budget
        self._logits = logits

    def take(self, sequence: ActiveSequence, decodes: bool = False) -> int:
        """Takes as many rows of a prompt as fit, or the row of a sequence that decodes; returns how many."""
        missing = sequence.missing
        count = 1 if decodes else prompt_rows(missing, self.prompt_rows, self._budget)
        if self._logits is not None:
            fitting = max(0, count - max(0, len(sequence.logits_positions(count)) - self._logits))
            if fitting < count and missing - fitting == 1:
                fitting -= 1
            count = 0 if fitting == 1 < missing else fitting  # no single rows of a prompt: see `prompt_rows`
            self._logits -= len(sequence.logits_positions(count))
        self.prompt_rows -= 0 if decodes else count
        return count


def peak_blocks(sequences: Sequence[ActiveSequence], shared: Sequence[int]) -> int:
    """The most blocks that `sequences` will hold at once, if none ends early and each adds one token per pass.

    The `shared` blocks of each sequence are not counted. The total falls only when a sequence ends, so its maximum is
    just before an end. Source: NanoFlow (Zhu et al. 2025), section 4 (admission by predicted peak), here computed
    exactly instead of from averages.
    """
    steps = np.array([s.steps_left for s in sequences])
    tokens = np.array([max(s.cached, len(s.tokens)) for s in sequences])
    ends = np.unique(steps)
    held = tokens[None, :] + ends[:, None] - 1  # at its last step a sequence has steps - 1 tokens more
    unshared = -(-held // BLOCK_SIZE) - np.array(shared)
    blocks = unshared * (steps[None, :] >= ends[:, None])
    return int(blocks.sum(axis=1).max())
