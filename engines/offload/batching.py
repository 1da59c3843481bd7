"""Who shares a pass: blocks in step (row, zigzag) or whatever is at hand (sweep), within the cache's pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engines.offload.kv_cache import PAGE_TOKENS, PagedCache, pages_for
from engines.offload.sequences import ActiveSequence


@dataclass(frozen=True)
class Part:
    """What a pass does of one sequence: its next `count` tokens that are not cached."""

    sequence: ActiveSequence
    count: int


class Batcher(ABC):
    """Forms passes. `next_pass` hands out parts whose pages are taken; `finish` frees what a sequence held."""

    def __init__(self, waiting: Iterable[ActiveSequence], cache: PagedCache) -> None:
        # stable: of those that arrive together the first asked for is the first served
        self._waiting = deque(sorted(waiting, key=lambda s: s.arrival_s))
        self._running: list[ActiveSequence] = []
        self._cache = cache

    @property
    def next_arrival_s(self) -> float | None:
        """When there is something to do: None when all is done, 0 when there is now."""
        if self._running:
            return 0.0
        return self._waiting[0].arrival_s if self._waiting else None

    @abstractmethod
    def next_pass(self, now_s: float) -> list[list[Part]]:
        """The batches of the next pass; empty where nothing has arrived."""

    def finish(self, sequence: ActiveSequence) -> None:
        """Takes out a sequence that is done."""
        self._running.remove(sequence)
        self._cache.give_back(sequence.pages)
        sequence.pages = []

    def _admit(self, now_s: float) -> ActiveSequence | None:
        """The next sequence that has arrived, if the cache will hold it to its end beside those that run."""
        if not self._waiting or self._waiting[0].arrival_s > now_s:
            return None
        if peak_pages([*self._running, self._waiting[0]]) > self._cache.pages:
            return None
        self._running.append(sequence := self._waiting.popleft())
        return sequence

    def _give_pages(self, parts: list[Part]) -> list[Part]:
        """Takes pages for what the parts add. Where they run out the youngest sequences wait, to be recomputed."""
        given: list[Part] = []
        for part in parts:
            missing = pages_for(part.sequence.cached + part.count) - len(part.sequence.pages)
            while missing > self._cache.free_pages and self._running[-1] is not part.sequence:
                self._put_back(self._running[-1])
                given = [p for p in given if p.sequence in self._running]
            if part.sequence in self._running and missing <= self._cache.free_pages:
                part.sequence.pages += self._cache.take(missing)
                given.append(part)
        return given

    def _put_back(self, sequence: ActiveSequence) -> None:
        self.finish(sequence)
        sequence.cached = 0
        self._waiting.appendleft(sequence)


class BlockBatcher(Batcher):
    """Blocks of `batches` x `size` sequences that start together; the next block starts when all have ended.

    A prompt is computed in chunks of at most `chunk` rows a batch and pass.
    """

    def __init__(
        self, waiting: Iterable[ActiveSequence], cache: PagedCache, size: int, batches: int, chunk: int
    ) -> None:
        super().__init__(waiting, cache)
        self._size = size
        self._batches = batches
        self._chunk = chunk
        self._block: list[list[ActiveSequence]] = []

    def next_pass(self, now_s: float) -> list[list[Part]]:
        if not self._running:
            while len(self._running) < self._size * self._batches and self._admit(now_s):
                pass
            self._block = [self._running[i : i + self._size] for i in range(0, len(self._running), self._size)]
        alive = [[s for s in batch if s in self._running] for batch in self._block]
        parts = [self._give_pages(_chunked(batch, self._chunk)) for batch in alive if batch]
        return [batch for batch in parts if batch]


class SweepBatcher(Batcher):
    """One batch: a token of every running sequence, and a chunk of the prompts of those that come next.

    At most `size` sequences run. `chunk(decoding)` is how many prompt tokens go with so many decoding rows.
    """

    def __init__(self, waiting: Iterable[ActiveSequence], cache: PagedCache, size: int, chunk: ChunkRule) -> None:
        super().__init__(waiting, cache)
        self._size = size
        self._rule = chunk

    def next_pass(self, now_s: float) -> list[list[Part]]:
        decoding = [Part(s, 1) for s in self._running if len(s.tokens) - s.cached == 1]
        left = self._rule(len(decoding))
        prompts: list[Part] = []
        for sequence in self._prompts(now_s):
            count = min(left, len(sequence.tokens) - sequence.cached)
            prompts.append(Part(sequence, count))
            left -= count
            if not left:
                break
        batch = self._give_pages(_singles_first([*decoding, *prompts]))
        return [batch] if batch else []

    def _prompts(self, now_s: float) -> Iterable[ActiveSequence]:
        """Sequences whose prompts are not cached: those begun, then new ones as long as they fit."""
        yield from [s for s in self._running if len(s.tokens) - s.cached > 1]
        while len(self._running) < self._size and (sequence := self._admit(now_s)):
            yield sequence


@dataclass(frozen=True)
class ChunkRule:
    """How many prompt tokens go into a pass of a sweep.

    `steady`: what keeps a full house, as each sequence that ends makes room for one. `balance`: rows at which a
    pass computes as long as its weights take to load: below it more rows cost no time. `most`: what memory allows.
    """

    steady: int
    balance: int
    most: int

    def __call__(self, decoding: int) -> int:
        return max(1, min(self.most, max(self.steady, self.balance - decoding)))


def peak_pages(sequences: Sequence[ActiveSequence]) -> int:
    """The most pages that `sequences` will hold at once, if none ends early and each goes on one token a pass.

    The sum only falls where one ends, so its maximum is just before. Source: NanoFlow (Zhu et al. 2025),
    section 4 (admission by predicted peak), exactly instead of by averages.
    """
    steps = np.array([s.steps_left for s in sequences])
    tokens = np.array([max(s.cached, len(s.tokens)) for s in sequences])
    ends = np.unique(steps)
    held = tokens[None, :] + ends[:, None] - 1  # at its last step a sequence has steps - 1 tokens more
    pages = -(-held // PAGE_TOKENS) * (steps[None, :] >= ends[:, None])
    return int(pages.sum(axis=1).max())


def _chunked(batch: Sequence[ActiveSequence], chunk: int) -> list[Part]:
    """A token of each sequence that decodes and up to `chunk` prompt tokens of the others."""
    parts: list[Part] = []
    left = chunk
    for sequence in batch:
        missing = len(sequence.tokens) - sequence.cached
        count = 1 if missing == 1 else min(left, missing)
        left -= count if missing > 1 else 0
        if count:
            parts.append(Part(sequence, count))
    return _singles_first(parts)


def _singles_first(parts: list[Part]) -> list[Part]:
    """As attention wants them."""
    return sorted(parts, key=lambda p: p.count > 1)
