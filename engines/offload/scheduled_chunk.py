"""What a pass takes of a sequence: its tokens and steps, the chunk of them that is scheduled, the rows it may have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from engines.offload.memory.kv_blocks import blocks_for
from harness.api import NanoOrder


class ActiveSequence:
    """Known tokens, the first `cached` of which have keys and values in the KV blocks of `block_table`.

    It generates up to `steps` tokens, one in each pass that reaches its last known token, at `times`. Such a token has
    its place, as a zero, as soon as the sequence has advanced, and its value once the pass's logits are there.
    """

    def __init__(self, tokens: Sequence[int], steps: int, arrival_s: float = 0.0) -> None:
        self.tokens = list(tokens)
        self.cached = 0
        self.block_table: list[int] = []
        self.arrival_s = arrival_s
        self.start_s = -1.0
        self.times: list[float] = []
        self.prefix_hit_tokens: int | None = None  # cached when it was first admitted
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

    def advance(self, count: int, now_s: float = math.nan) -> bool:
        """Its next `count` tokens are cached. Returns whether they generate one, at `now_s`."""
        self.cached += count
        if self.cached < len(self.tokens):
            return False
        self.tokens.append(0)
        self.times.append(now_s)
        return True

    def reset(self) -> None:
        """After preemption: all known tokens, generated ones too, will be computed again."""
        self.cached = 0

    def logits_positions(self, count: int) -> range:
        """The positions among the next `count` tokens that need logits: the last known token's, if it is reached."""
        end = self.cached + count
        return range(end - 1, end) if end == len(self.tokens) else range(0)


S = TypeVar("S", bound=ActiveSequence)


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
    def tokens(self) -> Sequence[int]:
        """The tokens that it computes."""
        return self.sequence.tokens[self.cached : self.cached + self.count]

    @property
    def missing_blocks(self) -> int:
        """KV blocks that the sequence lacks for these tokens."""
        return blocks_for(self.cached + self.count) - len(self.block_table)


def split(
    batch: Sequence[ScheduledChunk[S]], count: int, order: NanoOrder | None = None, cpu_attention: bool = False
) -> list[list[ScheduledChunk[S]]]:
    """Splits a batch into at most `count` nano-batches, in order, with similar numbers of rows, or those of an `order`
    where there are sequences enough. With `cpu_attention` each has its part of the prompts and of the sequences that
    decode: the host takes turns between nano-batches, and attends for single tokens only."""
    order = order if order is not None and order.cut != 0.5 and len(batch) >= count else None
    count = min(count, len(batch))
    nano_batches: list[list[ScheduledChunk[S]]] = [[] for _ in range(count)]
    single = [chunk for chunk in batch if chunk.count == 1]
    kinds = [single, [chunk for chunk in batch if chunk.count > 1]] if cpu_attention else [batch]
    for chunks in kinds:
        total, rows = sum(chunk.count for chunk in chunks), 0
        for chunk in chunks:
            middle = 2 * rows + chunk.count
            part = count * middle // (2 * total) if order is None else int(count * order.share(middle / (2 * total)))
            nano_batches[min(count - 1, part)].append(chunk)
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


class Room:
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
            if fitting < count:  # no single rows of a prompt, as in `prompt_rows`
                fitting -= 0 < fitting == missing - 1
                count = 0 if fitting == 1 < missing else fitting
            self._logits -= len(sequence.logits_positions(count))
        self.prompt_rows -= 0 if decodes else count
        return count


def logits_indices(batch: Sequence[ScheduledChunk[S]]) -> list[int]:
    """The indices of a packed batch's tokens whose logits are computed."""
    indices, first = list[int](), 0
    for chunk in batch:
        indices += [first + at - chunk.cached for at in chunk.sequence.logits_positions(chunk.count)]
        first += chunk.count
    return indices
