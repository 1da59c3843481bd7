"""Who shares a pass: blocks in step (row, zigzag) or whatever is at hand (sweep), within the cache's pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from engines.offload.kv_cache.block_manager import PagePool, page_names
from engines.offload.memory.kv_blocks import PAGE_TOKENS, pages_for
from harness.api import OffloadPolicy


class Waiting(Protocol):
    """What batching needs to know of a sequence; see sequences.py."""

    tokens: list[int]
    cached: int
    pages: list[int]
    arrival_s: float

    @property
    def steps_left(self) -> int: ...

    @property
    def shareable(self) -> int: ...

    def restart(self) -> None: ...

    def wanted(self, count: int) -> range: ...


S = TypeVar("S", bound=Waiting)

#: After so many blocks of requests a sweep's start and end no longer weigh much in its throughput.
_SWEEP_BLOCKS = 4


def steady_blocks(policy: OffloadPolicy) -> int:
    """How many blocks of requests it takes until throughput no longer changes."""
    return _SWEEP_BLOCKS if policy.schedule == "sweep" else 1


@dataclass(frozen=True)
class Part(Generic[S]):
    """What a pass does of one sequence: its next `count` tokens that are not cached."""

    sequence: S
    count: int


class Batcher(ABC, Generic[S]):
    """Forms passes. `next_pass` hands out parts whose pages are taken; `finish` frees what a sequence held.

    A sequence that begins as another one did, at the grain of pages, is let in with that one's pages.
    `shared_tokens` counts what need not be computed because of it.
    """

    def __init__(self, waiting: Iterable[S], cache: PagePool) -> None:
        # stable: of those that arrive together the first asked for is the first served
        self._waiting = deque(sorted(waiting, key=lambda s: s.arrival_s))
        self._running: dict[S, None] = {}  # in the order of their admission
        self._cache = cache
        self._names: dict[S, list[bytes]] = {}  # by sequence, of its full pages as far as they were needed
        self._borrowed: dict[S, list[int]] = {}  # by running sequence, the pages it was let in with
        self._returned: set[S] = set()  # put back once, to be recomputed
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
    def next_pass(self, now_s: float) -> list[list[Part[S]]]:
        """The batches of the next pass; empty where nothing has arrived, or nobody gets the pages for it."""

    def finish(self, sequence: S) -> None:
        """Takes out a sequence that is done."""
        del self._running[sequence], self._borrowed[sequence]
        self._names.pop(sequence, None)
        self._cache.give_back(sequence.pages)
        sequence.pages = []

    def close(self) -> None:
        """Frees what is held by sequences that will not be finished."""
        for sequence in list(self._running):
            self.finish(sequence)

    def _admit(self, now_s: float) -> S | None:
        """The next sequence that has arrived, if the cache will hold it to its end beside those that run."""
        if not self._waiting or self._waiting[0].arrival_s > now_s:
            return None
        sequence = self._waiting[0]
        names = self._names.setdefault(sequence, [])
        page_names(sequence.tokens, names, sequence.shareable)
        known = self._cache.known(names[: sequence.shareable // PAGE_TOKENS])
        if not self._fits(sequence, known):
            return None
        self._running[self._waiting.popleft()] = None
        self._borrowed[sequence] = known
        self._cache.hold(known)
        sequence.pages, sequence.cached = list(known), len(known) * PAGE_TOKENS
        if sequence not in self._returned:  # who comes back may find pages of its own
            self.shared_tokens += sequence.cached
        return sequence

    def _fits(self, sequence: S, known: Sequence[int]) -> bool:
        """Whether the cache will hold it to its end beside those that run, if it begins with `known` pages."""
        lent = {page for pages in self._borrowed.values() for page in pages} | set(known)
        borrowed = [*(len(pages) for pages in self._borrowed.values()), len(known)]
        return peak_pages([*self._running, sequence], borrowed) + len(lent) <= self._cache.pages

    def _give_pages(self, batches: Sequence[Sequence[Part[S]]]) -> list[list[Part[S]]]:
        """The parts that can be computed, with pages for what they add.

        The predicted peak can be missed where a prompt takes more passes than one: then the youngest sequences
        give up their pages and wait, to be recomputed; the oldest always goes on.
        """
        for part in (p for batch in batches for p in batch):
            if part.sequence not in self._running:  # it has made room for an older one
                continue
            missing = pages_for(part.sequence.cached + part.count) - len(part.sequence.pages)
            if missing <= 0:
                continue
            while missing > self._cache.free_pages and (youngest := next(reversed(self._running))) is not part.sequence:
                self._put_back(youngest)
            if missing <= self._cache.free_pages:
                part.sequence.pages += self._cache.take(missing)
        ready = [[p for p in batch if p.sequence in self._running and _has_pages(p)] for batch in batches]
        for part in (p for batch in ready for p in batch):
            self._publish(part)
        return [batch for batch in ready if batch]

    def _publish(self, part: Part[S]) -> None:
        """Lets others find the pages that this pass fills."""
        sequence, end = part.sequence, part.sequence.cached + part.count
        if sequence.cached // PAGE_TOKENS == end // PAGE_TOKENS:
            return
        names = self._names.setdefault(sequence, [])
        page_names(sequence.tokens, names, end)
        for i in range(sequence.cached // PAGE_TOKENS, end // PAGE_TOKENS):
            self._cache.publish(sequence.pages[i], names[i])

    def _put_back(self, sequence: S) -> None:
        self.finish(sequence)
        self._returned.add(sequence)
        sequence.restart()
        self._waiting.appendleft(sequence)


class BlockBatcher(Batcher[S]):
    """Blocks of `batches` x `size` sequences that start together; the next block starts when all have ended.

    A prompt is computed in chunks of at most `chunk` rows a batch and pass.
    """

    def __init__(
        self, waiting: Iterable[S], cache: PagePool, size: int, batches: int, chunk: int, heads: int | None = None
    ) -> None:
        super().__init__(waiting, cache)
        self._heads = heads
        self._size = size
        self._batches = batches
        self._chunk = chunk
        self._block: list[list[S]] = []

    def next_pass(self, now_s: float) -> list[list[Part[S]]]:
        if not self._running:
            while len(self._running) < self._size * self._batches and self._admit(now_s):
                pass
            running = list(self._running)
            self._block = [running[i : i + self._size] for i in range(0, len(running), self._size)]
        alive = [[s for s in batch if s in self._running] for batch in self._block]
        return self._give_pages([self._parts(batch) for batch in alive])

    def _parts(self, batch: Sequence[S]) -> list[Part[S]]:
        """A token of each sequence that decodes and up to `chunk` prompt tokens of the others."""
        parts = []
        left, heads = self._chunk, self._heads
        for sequence in batch:
            missing = len(sequence.tokens) - sequence.cached
            count = 1 if missing == 1 else prompt_rows(missing, left, self._chunk)
            count, heads = _headed(sequence, count, heads)
            left -= count if missing > 1 else 0
            if count:
                parts.append(Part(sequence, count))
        return parts


class SweepBatcher(Batcher[S]):
    """One batch: a token of every running sequence, and a chunk of the prompts of those that come next.

    At most `size` sequences run. `rule(decoding)` is how many prompt tokens go with so many decoding rows.
    """

    def __init__(
        self, waiting: Iterable[S], cache: PagePool, size: int, rule: ChunkRule, heads: int | None = None
    ) -> None:
        super().__init__(waiting, cache)
        self._heads = heads
        self._size = size
        self._rule = rule

    def next_pass(self, now_s: float) -> list[list[Part[S]]]:
        parts = [Part(s, 1) for s in self._running if len(s.tokens) - s.cached == 1]
        left = room = self._rule(len(parts))
        heads = self._heads
        for sequence in self._prompts(now_s):
            count = prompt_rows(len(sequence.tokens) - sequence.cached, left, room)
            count, heads = _headed(sequence, count, heads)
            if not count:
                break
            parts.append(Part(sequence, count))
            left -= count
            if not left:
                break
        return self._give_pages([parts])

    def _prompts(self, now_s: float) -> Iterable[S]:
        """Sequences whose prompts are not cached: those begun, then new ones as long as they fit."""
        yield from [s for s in self._running if len(s.tokens) - s.cached > 1]
        while len(self._running) < self._size and (sequence := self._admit(now_s)):
            yield sequence


@dataclass(frozen=True)
class ChunkRule:
    """How many prompt tokens go into a pass of a sweep.

    `steady`: what keeps a full house, as each sequence that ends makes room for one. `balance`: rows up to which
    prompts fill a pass beyond that, as fewer would cost no less time. `most`: what memory allows.
    """

    steady: int
    balance: int
    most: int

    def __call__(self, decoding: int) -> int:
        return max(1, min(self.most, max(self.steady, self.balance - decoding)))


def split(batch: Sequence[Part[S]], count: int) -> list[list[Part[S]]]:
    """A batch in at most `count` parts of about as many rows, in order."""
    count = min(count, len(batch))
    total, rows = sum(part.count for part in batch), 0
    found: list[list[Part[S]]] = [[] for _ in range(count)]
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


def _headed(sequence: Waiting, count: int, heads: int | None) -> tuple[int, int | None]:
    """How many of a sequence's next `count` tokens can be computed where `heads` more may meet the head, and how many
    may after them. None alone of a prompt, as in `prompt_rows`."""
    if heads is None:
        return count, None
    missing = len(sequence.tokens) - sequence.cached
    fitting = max(0, count - max(0, len(sequence.wanted(count)) - heads))
    if fitting < count and missing - fitting == 1:
        fitting -= 1
    if fitting == 1 < missing:
        fitting = 0
    return fitting, heads - len(sequence.wanted(fitting))


def peak_pages(sequences: Sequence[Waiting], borrowed: Sequence[int] = ()) -> int:
    """The most pages that `sequences` will hold at once, if none ends early and each goes on one token a pass.

    Those that each has `borrowed` are left out. The sum only falls where one ends, so its maximum is just before.
    Source: NanoFlow (Zhu et al. 2025), section 4 (admission by predicted peak), exactly instead of by averages.
    """
    steps = np.array([s.steps_left for s in sequences])
    tokens = np.array([max(s.cached, len(s.tokens)) for s in sequences])
    ends = np.unique(steps)
    held = tokens[None, :] + ends[:, None] - 1  # at its last step a sequence has steps - 1 tokens more
    own = -(-held // PAGE_TOKENS) - (np.array(borrowed, dtype=int) if len(borrowed) else 0)
    pages = own * (steps[None, :] >= ends[:, None])
    return int(pages.sum(axis=1).max())


def _has_pages(part: Part[S]) -> bool:
    return pages_for(part.sequence.cached + part.count) <= len(part.sequence.pages)
