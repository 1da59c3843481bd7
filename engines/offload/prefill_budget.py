"""How fast a sweep lets prompts in: found by playing the job through in numbers before it is run.

Prompts that are let in all at once give sequences of one age: they need their most memory together, so that fewer
fit than of mixed ages, and they end together, for the next ones to do the same. Prompts that are let in one after
the other make passes with few rows at the start. Which costs less depends on the job, the disk and the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.memory.kv_blocks import blocks_for
from engines.offload.memory.plan import MemoryPlan
from engines.offload.scheduler import BlockScheduler, ContinuousScheduler, PrefillBudget, Scheduler, Waiting
from harness.api import OffloadPolicy

S = TypeVar("S", bound=Waiting)

#: Parts of the balance up to which prompts may fill a pass; the first of equals is taken.
_SHARES = (1.0, 0.5, 0.25, 0.0)
#: Of a long job so many times the sequences that run together are played.
_BLOCKS = 4


def make_scheduler(
    sequences: Sequence[S],
    cache: BlockManager,
    policy: OffloadPolicy,
    plan: MemoryPlan,
    balance: int,
    chunk: int,
    max_logits: int | None = None,
) -> Scheduler[S]:
    """Who forms the passes of a job: blocks in step, or a sweep under the rule that is best for it.

    `balance`: rows at which a pass computes as long as its weights take to load; `chunk`: prompt tokens a batch and
    pass, of which at most `max_logits` may meet the head.
    """
    if policy.schedule != "sweep":
        return BlockScheduler(sequences, cache, policy.gpu_batch_size, policy.num_gpu_batches, chunk, max_logits)
    work = [(s.tokens, s.steps_left) for s in sequences]
    mean = sum(len(tokens) + steps / 2 for tokens, steps in work) / len(work)
    together = max(1, min(plan.sequences, cache.num_blocks // blocks_for(int(mean) + 1)))
    rule = search_prefill_budget(work, cache.num_blocks, plan.sequences, together, balance, chunk)
    return ContinuousScheduler(sequences, cache, plan.sequences, rule, max_logits)


def search_prefill_budget(
    work: Sequence[tuple[Sequence[int], int]], blocks: int, size: int, together: int, balance: int, most: int
) -> PrefillBudget:
    """The rule under which a job of `work` (known tokens, steps) does the most steps in a unit of time.

    A pass takes as long as its rows, or as `balance` rows where they are fewer. `together`: how many sequences of
    mixed ages the cache of `blocks` holds, at most `size`; `most`: prompt tokens that memory allows in a pass.
    """
    prompts, steps = sum(len(tokens) for tokens, _ in work), sum(steps for _, steps in work)
    steady = -(-together * prompts // steps)
    rules = [PrefillBudget(steady, int(balance * share), most) for share in _SHARES]
    played = work[: _BLOCKS * together]
    to_the_end = len(played) == len(work)
    return max(rules, key=lambda rule: _pace(played, blocks, size, rule, balance, to_the_end))


def _pace(
    work: Sequence[tuple[Sequence[int], int]],
    blocks: int,
    size: int,
    rule: PrefillBudget,
    balance: int,
    to_the_end: bool,
) -> float:
    """Steps per unit of time, to the end or, where more would follow, until the last one is let in."""
    sequences = [Numbers(tokens, steps) for tokens, steps in work]
    scheduler = ContinuousScheduler(sequences, BlockManager(blocks), size, rule)
    done, time = 0, 0
    while scheduler.waiting if not to_the_end else scheduler.next_arrival_s is not None:
        parts = [part for batch in scheduler.next_pass(math.inf) for part in batch]
        if not parts:
            break
        time += max(balance, sum(part.count for part in parts))
        for part in parts:
            if part.sequence.advance(part.count, time):
                done += 1
                if not part.sequence.steps_left:
                    scheduler.finish(part.sequence)
    return done / max(1, time)


class Numbers:
    """A sequence that generates nothing but zeros. `times`: when."""

    def __init__(self, tokens: Sequence[int], steps: int, arrival_s: float = 0.0) -> None:
        self.tokens = list(tokens)
        self.steps_left = steps
        self.arrival_s = arrival_s
        self.times: list[float] = []
        self.cached = 0
        self.block_table: list[int] = []

    @property
    def cacheable_tokens(self) -> int:
        return max(0, len(self.tokens) - 2)

    def reset(self) -> None:
        self.cached = 0

    def wanted(self, count: int) -> range:
        """As of a sequence that generates."""
        end = self.cached + count
        return range(end - 1, end) if end == len(self.tokens) else range(0)

    def wants(self, count: int) -> bool:
        """Whether `count` more tokens end in one whose logits are wanted."""
        return self.cached + count == len(self.tokens)

    def advance(self, count: int, now: float) -> bool:
        """Whether `count` more tokens, which are done now, make a step."""
        self.cached += count
        if self.cached < len(self.tokens):
            return False
        self.tokens.append(0)
        self.times.append(now)
        self.steps_left -= 1
        return True
