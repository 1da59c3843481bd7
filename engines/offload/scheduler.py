"""Who shares a pass: blocks in step (row, zigzag) or whatever is at hand (sweep), within the cache's blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from engines.offload.kv_cache.block_manager import BlockManager, extend_block_hashes
from engines.offload.memory.kv_blocks import BLOCK_SIZE, blocks_for
from harness.api import OffloadPolicy


class Waiting(Protocol):
    """What batching needs to know of a sequence; see sequences.py."""

    tokens: list[int]
    cached: int
    block_table: list[int]
    arrival_s: float

    @property
    def steps_left(self) -> int: ...

    @property
    def cacheable_tokens(self) -> int: ...

    def reset(self) -> None: ...

    def wanted(self, count: int) -> range: ...


S = TypeVar("S", bound=Waiting)

#: After so many blocks of requests a sweep's start and end no longer weigh much in its throughput.
_SWEEP_BLOCKS = 4


def steady_blocks(policy: OffloadPolicy) -> int:
    """How many blocks of requests it takes until throughput no longer changes."""
    return _SWEEP_BLOCKS if policy.schedule == "sweep" else 1


@dataclass(frozen=True)
class ScheduledChunk(Generic[S]):
    """What a pass does of one sequence: its next `count` tokens that are not cached."""

    sequence: S
    count: int


class Scheduler(ABC, Generic[S]):
    """Forms passes. `next_pass` hands out parts whose blocks are taken; `finish` frees what a sequence held.

    A sequence that begins as another one did, at the grain of blocks, is let in with that one's blocks.
    `shared_tokens` counts what need not be computed because of it.
    """

    def __init__(self, waiting: Iterable[S], cache: BlockManager) -> None:
        # stable: of those that arrive together the first asked for is the first served
        self._waiting = deque(sorted(waiting, key=lambda s: s.arrival_s))
        self._running: dict[S, None] = {}  # in the order of their admission
        self._cache = cache
        self._names: dict[S, list[bytes]] = {}  # by sequence, of its full blocks as far as they were needed
        self._borrowed: dict[S, list[int]] = {}  # by running sequence, the blocks it was let in with
        self._preempted: set[S] = set()  # put back once, to be recomputed
        self.shared_tokens = 0

    @property
    def next_arrival_s(self) -> float | None:
        """When there is something to do: None when all is done, 0 when there is now."""
        if self._running:
            return 0.0
        return self._waiting[0].arrival_s if self._waiting else None

    @property
    def waiting(self) -> int:
        """How many have not been let in."""
        return len(self._waiting)

    @abstractmethod
    def next_pass(self, now_s: float) -> list[list[ScheduledChunk[S]]]:
        """The batches of the next pass; empty where nothing has arrived, or nobody gets the blocks for it."""

    def finish(self, sequence: S) -> None:
        """Takes out a sequence that is done."""
        del self._running[sequence], self._borrowed[sequence]
        self._names.pop(sequence, None)
        self._cache.free(sequence.block_table)
        sequence.block_table = []

    def close(self) -> None:
        """Frees what is held by sequences that will not be finished."""
        for sequence in list(self._running):
            self.finish(sequence)

    def admit(self, now_s: float) -> S | None:
        """The next sequence that has arrived, if the cache will hold it to its end beside those that run."""
        if not self._waiting or self._waiting[0].arrival_s > now_s:
            return None
        sequence = self._waiting[0]
        names = self._names.setdefault(sequence, [])
        extend_block_hashes(sequence.tokens, names, sequence.cacheable_tokens)
        known = self._cache.match_prefix(names[: sequence.cacheable_tokens // BLOCK_SIZE])
        if not self._fits(sequence, known):
            return None
        self._running[self._waiting.popleft()] = None
        self._borrowed[sequence] = known
        self._cache.ref(known)
        sequence.block_table, sequence.cached = list(known), len(known) * BLOCK_SIZE
        if sequence not in self._preempted:  # who comes back may find blocks of its own
            self.shared_tokens += sequence.cached
        return sequence

    def _fits(self, sequence: S, known: Sequence[int]) -> bool:
        """Whether the cache will hold it to its end beside those that run, if it begins with `known` blocks."""
        lent = {block for blocks in self._borrowed.values() for block in blocks} | set(known)
        borrowed = [*(len(blocks) for blocks in self._borrowed.values()), len(known)]
        return peak_blocks([*self._running, sequence], borrowed) + len(lent) <= self._cache.num_blocks

    def _allocate_blocks(self, batches: Sequence[Sequence[ScheduledChunk[S]]]) -> list[list[ScheduledChunk[S]]]:
        """The parts that can be computed, with blocks for what they add.

        The predicted peak can be missed where a prompt takes more passes than one: then the youngest sequences
        give up their blocks and wait, to be recomputed; the oldest always goes on.
        """
        for part in (p for batch in batches for p in batch):
            if part.sequence not in self._running:  # it has made room for an older one
                continue
            missing = blocks_for(part.sequence.cached + part.count) - len(part.sequence.block_table)
            if missing <= 0:
                continue
            while (
                missing > self._cache.num_free_blocks
                and (youngest := next(reversed(self._running))) is not part.sequence
            ):
                self._preempt(youngest)
            if missing <= self._cache.num_free_blocks:
                part.sequence.block_table += self._cache.allocate(missing)
        ready = [[p for p in batch if p.sequence in self._running and _has_blocks(p)] for batch in batches]
        for part in (p for batch in ready for p in batch):
            self._publish(part)
        return [batch for batch in ready if batch]

    def _publish(self, part: ScheduledChunk[S]) -> None:
        """Lets others find the blocks that this pass fills."""
        sequence, end = part.sequence, part.sequence.cached + part.count
        if sequence.cached // BLOCK_SIZE == end // BLOCK_SIZE:
            return
        names = self._names.setdefault(sequence, [])
        extend_block_hashes(sequence.tokens, names, end)
        for i in range(sequence.cached // BLOCK_SIZE, end // BLOCK_SIZE):
            self._cache.cache_block(sequence.block_table[i], names[i])

    def _preempt(self, sequence: S) -> None:
        self.finish(sequence)
        self._preempted.add(sequence)
        sequence.reset()
        self._waiting.appendleft(sequence)


class BlockScheduler(Scheduler[S]):
    """Blocks of `batches` x `size` sequences that start together; the next block starts when all have ended.

    A prompt is computed in chunks of at most `chunk` rows a batch and pass.
    """

    def __init__(
        self,
        waiting: Iterable[S],
        cache: BlockManager,
        size: int,
        batches: int,
        chunk: int,
        max_logits: int | None = None,
    ) -> None:
        super().__init__(waiting, cache)
        self._max_logits = max_logits
        self._size = size
        self._batches = batches
        self._chunk = chunk
        self._block: list[list[S]] = []

    def next_pass(self, now_s: float) -> list[list[ScheduledChunk[S]]]:
        if not self._running:
            while len(self._running) < self._size * self._batches and self.admit(now_s):
                pass
            running = list(self._running)
            self._block = [running[i : i + self._size] for i in range(0, len(running), self._size)]
        alive = [[s for s in batch if s in self._running] for batch in self._block]
        return self._allocate_blocks([self._parts(batch) for batch in alive])

    def _parts(self, batch: Sequence[S]) -> list[ScheduledChunk[S]]:
        """A token of each sequence that decodes and up to `chunk` prompt tokens of the others."""
        parts = []
        left, max_logits = self._chunk, self._max_logits
        for sequence in batch:
            missing = len(sequence.tokens) - sequence.cached
            count = 1 if missing == 1 else prompt_rows(missing, left, self._chunk)
            count, max_logits = _headed(sequence, count, max_logits)
            left -= count if missing > 1 else 0
            if count:
                parts.append(ScheduledChunk(sequence, count))
        return parts


class ContinuousScheduler(Scheduler[S]):
    """One batch: a token of every running sequence, and a chunk of the prompts of those that come next.

    At most `size` sequences run. `rule(decoding)` is how many prompt tokens go with so many decoding rows.
    """

    def __init__(
        self, waiting: Iterable[S], cache: BlockManager, size: int, rule: PrefillBudget, max_logits: int | None = None
    ) -> None:
        super().__init__(waiting, cache)
        self._max_logits = max_logits
        self._size = size
        self._rule = rule

    def next_pass(self, now_s: float) -> list[list[ScheduledChunk[S]]]:
        parts = [ScheduledChunk(s, 1) for s in self._running if len(s.tokens) - s.cached == 1]
        left = room = self._rule(len(parts))
        max_logits = self._max_logits
        for sequence in self._prompts(now_s):
            count = prompt_rows(len(sequence.tokens) - sequence.cached, left, room)
            count, max_logits = _headed(sequence, count, max_logits)
            if not count:
                break
            parts.append(ScheduledChunk(sequence, count))
            left -= count
            if not left:
                break
        return self._allocate_blocks([parts])

    def _prompts(self, now_s: float) -> Iterable[S]:
        """Sequences whose prompts are not cached: those begun, then new ones as long as they fit."""
        yield from [s for s in self._running if len(s.tokens) - s.cached > 1]
        while len(self._running) < self._size and (sequence := self.admit(now_s)):
            yield sequence


@dataclass(frozen=True)
class PrefillBudget:
    """How many prompt tokens go into a pass of a sweep.

    `steady`: what keeps a full house, as each sequence that ends makes room for one. `balance`: rows up to which
    prompts fill a pass beyond that, as fewer would cost no less time. `most`: what memory allows.
    """

    steady: int
    balance: int
    most: int

    def __call__(self, decoding: int) -> int:
        return max(1, min(self.most, max(self.steady, self.balance - decoding)))


def split(batch: Sequence[ScheduledChunk[S]], count: int) -> list[list[ScheduledChunk[S]]]:
    """A batch in at most `count` parts of about as many rows, in order."""
    count = min(count, len(batch))
    total, rows = sum(part.count for part in batch), 0
    found: list[list[ScheduledChunk[S]]] = [[] for _ in range(count)]
    for part in batch:
        found[min(count - 1, count * (2 * rows + part.count) // (2 * total))].append(part)
        rows += part.count
    return [parts for parts in found if parts]


def prompt_rows(missing: int, left: int, room: int) -> int:
    """How many of a prompt's `missing` rows go into a pass that has room for `left` more of all prompts' `room`.

    Never one by itself, where that can be helped: the attention of a row alone is summed in another order, and a
    result must not depend on who shares the pass.
    """
    if missing <= left or room < 3:
        return min(left, missing)
    count = left - (missing == left + 1)
    return count if count > 1 else 0


def _headed(sequence: Waiting, count: int, max_logits: int | None) -> tuple[int, int | None]:
    """How many of a sequence's next `count` tokens can be computed where `max_logits` more may meet the head, and how
    many may after them. None alone of a prompt, as in `prompt_rows`."""
    if max_logits is None:
        return count, None
    missing = len(sequence.tokens) - sequence.cached
    fitting = max(0, count - max(0, len(sequence.wanted(count)) - max_logits))
    if fitting < count and missing - fitting == 1:
        fitting -= 1
    if fitting == 1 < missing:
        fitting = 0
    return fitting, max_logits - len(sequence.wanted(fitting))


def peak_blocks(sequences: Sequence[Waiting], borrowed: Sequence[int] = ()) -> int:
    """The most blocks that `sequences` will hold at once, if none ends early and each goes on one token a pass.

    Those that each has `borrowed` are left out. The sum only falls where one ends, so its maximum is just before.
    Source: NanoFlow (Zhu et al. 2025), section 4 (admission by predicted peak), exactly instead of by averages.
    """
    steps = np.array([s.steps_left for s in sequences])
    tokens = np.array([max(s.cached, len(s.tokens)) for s in sequences])
    ends = np.unique(steps)
    held = tokens[None, :] + ends[:, None] - 1  # at its last step a sequence has steps - 1 tokens more
    own = -(-held // BLOCK_SIZE) - (np.array(borrowed, dtype=int) if len(borrowed) else 0)
    blocks = own * (steps[None, :] >= ends[:, None])
    return int(blocks.sum(axis=1).max())


def _has_blocks(part: ScheduledChunk[S]) -> bool:
    return blocks_for(part.sequence.cached + part.count) <= len(part.sequence.block_table)
