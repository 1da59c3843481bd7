"""How many KV blocks sequences will hold at most, which decides whether one more is admitted.

Source: NanoFlow (Zhu et al. 2025), section 4.4.
"""

from collections.abc import Collection
from copy import copy
from itertools import chain
from typing import Any, Self

import numpy as np

from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.scheduled_chunk import ActiveSequence


class AverageLength:
    """The mean number of tokens that sequences generated until they ended, as a guess of how far others will go."""

    def __init__(self) -> None:
        self._ended = self._tokens = 0

    def observe(self, sequence: ActiveSequence) -> None:
        """A sequence has ended."""
        self._ended += 1
        self._tokens += len(sequence.times)

    def steps_left(self, sequence: ActiveSequence) -> int:
        """How many passes a sequence still needs if it is an average one: at least one, at most what it may take."""
        if not self._ended:
            return sequence.steps_left
        expected = -(-self._tokens // self._ended) - len(sequence.times)
        return max(1, min(sequence.steps_left, expected))


class BlockDemand:
    """The most blocks that sequences will hold at once, if each ends after its steps and adds one token in each.

    The total falls only when a sequence ends, so its maximum is just before an end. NanoFlow computes it from averages;
    with the most steps that sequences may take it is exact. Blocks that a sequence found cached count once for all.
    """

    def __init__(self, sequences: Collection[tuple[ActiveSequence, Collection[int], int]] = ()) -> None:
        """`sequences`, each with the cached blocks that it was admitted with and the steps that are left to it."""
        rows = [(_tokens(sequence), len(prefix), steps) for sequence, prefix, steps in sequences]
        self._tokens, self._shared, self._steps = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        self._ends = np.unique(self._steps)
        self._held = np.array([self._held_at(end) for end in self._ends], dtype=np.int64)  # but for shared blocks
        self._prefixes = frozenset(chain.from_iterable(prefix for _, prefix, _ in sequences))

    @property
    def most_blocks(self) -> int:
        """Blocks held at the worst of times."""
        return int(self._held.max(initial=0)) + len(self._prefixes)

    def plus(self, sequence: ActiveSequence, prefix: Collection[int], steps: int) -> Self:
        """That of the same sequences and one more, found without looking at each of them again."""
        more = copy(self)
        at = int(np.searchsorted(self._ends, steps))
        if at == len(self._ends) or self._ends[at] != steps:
            more._ends = np.insert(self._ends, at, steps)
            more._held = np.insert(self._held, at, self._held_at(steps))
        else:
            more._held = self._held.copy()
        more._held[: at + 1] += _blocks(_tokens(sequence), more._ends[: at + 1]) - len(prefix)
        more._tokens = np.append(self._tokens, _tokens(sequence))
        more._shared = np.append(self._shared, len(prefix))
        more._steps = np.append(self._steps, steps)
        more._prefixes = self._prefixes.union(prefix)
        return more

    def _held_at(self, end: int) -> int:
        """Blocks of those that are there until `end` passes from now, in the last of these."""
        there = self._steps >= end
        return int((_blocks(self._tokens[there], end) - self._shared[there]).sum())


def _tokens(sequence: ActiveSequence) -> int:
    return max(sequence.cached, len(sequence.tokens))


def _blocks(tokens: Any, step: Any) -> Any:
    """Blocks of sequences of `tokens` in their last of so many steps, which adds to the cache what the one before it
    generated. Of integers or arrays."""
    return -(-(tokens + step - 1) // BLOCK_SIZE)
