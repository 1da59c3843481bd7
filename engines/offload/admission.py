"""How many KV blocks sequences will hold at most, which decides whether one more is admitted.

Source: NanoFlow (Zhu et al. 2025), section 4.4.
"""

from collections.abc import Sequence

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


def peak_blocks(sequences: Sequence[ActiveSequence], shared: Sequence[int], steps_left: Sequence[int]) -> int:
    """The most blocks that `sequences` will hold at once, if each ends after `steps_left` passes and adds one token in
    each.

    The `shared` blocks of each sequence are not counted. The total falls only when a sequence ends, so its maximum is
    just before an end. NanoFlow computes it from averages; with the most steps that sequences may take it is exact.
    """
    steps = np.array(steps_left)
    tokens = np.array([max(s.cached, len(s.tokens)) for s in sequences])
    ends = np.unique(steps)
    held = tokens[None, :] + ends[:, None] - 1  # at its last step a sequence has steps - 1 tokens more
    unshared = -(-held // BLOCK_SIZE) - np.array(shared)
    blocks = unshared * (steps[None, :] >= ends[:, None])
    return int(blocks.sum(axis=1).max())
