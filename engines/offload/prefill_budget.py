"""How many prompt tokens a sweep's passes take: found by simulating the job with each candidate before it is run.

Prompts that start all at once give sequences of one age: they need their most memory together, so fewer fit than of
mixed ages, and they end together, for the next ones to do the same. Prompts that start one after the other make passes
with few rows at the beginning. Which costs less depends on the job, the disk and the arithmetic.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from engines.offload.admission import AverageLength
from engines.offload.block_scheduler import BlockScheduler
from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.memory.kv_blocks import blocks_for
from engines.offload.memory.plan import MemoryPlan
from engines.offload.scheduled_chunk import ActiveSequence
from engines.offload.scheduler import ContinuousScheduler, Scheduler
from harness.api import OffloadPolicy
from harness.api.machine import mean_cached_tokens

S = TypeVar("S", bound=ActiveSequence)

#: Fractions of the balance up to which prompts may fill a pass; the first of equally good ones is taken.
_FRACTIONS = (1.0, 0.5, 0.25, 0.0)
#: Of a long job this many times the sequences that run together are simulated.
_BLOCKS = 4


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


def steady_blocks(policy: OffloadPolicy) -> int:
    """How many blocks of requests a measurement needs until its throughput no longer changes: after four the start and
    end of a sweep hardly affect it."""
    return 4 if policy.schedule == "sweep" else 1


def make_scheduler(
    sequences: Iterable[S],
    cache: BlockManager,
    policy: OffloadPolicy,
    plan: MemoryPlan,
    budget: Callable[[int], int],
    prefill_chunk: int,
    max_logits: int | None = None,
    average: AverageLength | None = None,
) -> Scheduler[S]:
    """The scheduler of a policy: a sweep, whose passes take the prompt tokens that `budget` allows, or blocks in step.

    `prefill_chunk`: prompt tokens a batch and pass of blocks; `max_logits`: how many of them may get logits. `average`:
    the length by which a sweep admits, instead of the longest.
    """
    if policy.schedule == "sweep":
        return ContinuousScheduler(sequences, cache, plan.sequences, budget, max_logits, average)
    size, batches = policy.gpu_batch_size, policy.num_gpu_batches
    return BlockScheduler(sequences, cache, size, batches, prefill_chunk, max_logits)


def job_budget(
    work: Sequence[tuple[Sequence[int], int]],
    blocks: int,
    policy: OffloadPolicy,
    plan: MemoryPlan,
    balance_rows: int,
    prefill_chunk: int,
) -> PrefillBudget:
    """The budget that is best for a job of `work` (known tokens, steps) in a cache of `blocks`, where the policy is a
    sweep; else `prefill_chunk`.

    `balance_rows`: rows at which a pass computes as long as its weights take to load.
    """
    if policy.schedule != "sweep" or not work:
        return PrefillBudget(prefill_chunk, balance_rows, prefill_chunk)
    mean = sum(mean_cached_tokens(len(tokens), steps) for tokens, steps in work) / len(work)
    together = max(1, min(plan.sequences, blocks // blocks_for(int(mean) + 1)))
    return search_prefill_budget(work, blocks, plan.sequences, together, balance_rows, prefill_chunk)


def search_prefill_budget(
    work: Sequence[tuple[Sequence[int], int]], blocks: int, size: int, together: int, balance_rows: int, most: int
) -> PrefillBudget:
    """The budget with which a job of `work` (known tokens, steps) does the most steps in a unit of time.

    A pass takes as long as its rows, or as `balance_rows` where it has fewer. `together`: how many sequences of mixed
    ages a cache of `blocks` holds, at most `size`; `most`: prompt tokens that memory allows in a pass.
    """
    prompts, steps = sum(len(tokens) for tokens, _ in work), sum(steps for _, steps in work)
    steady = -(-together * prompts // steps)
    # a balance that the steady tokens exceed changes nothing
    balances = dict.fromkeys(max(steady, int(balance_rows * fraction)) for fraction in _FRACTIONS)
    budgets = [PrefillBudget(steady, balance, most) for balance in balances]
    if len(budgets) == 1:
        return budgets[0]
    simulated = work[: _BLOCKS * together]
    to_the_end = len(simulated) == len(work)

    def pace(budget: PrefillBudget) -> float:
        """Steps per unit of time, to the end or, where more sequences would follow, until the last one is admitted."""
        sequences = [SimulatedSequence(tokens, steps) for tokens, steps in simulated]
        scheduler = ContinuousScheduler(sequences, BlockManager(blocks), size, budget)
        done, time = 0, 0
        while scheduler.waiting if not to_the_end else scheduler.next_arrival_s is not None:
            chunks = list(chain.from_iterable(scheduler.next_pass(math.inf)))
            if not chunks:
                break
            time += max(balance_rows, sum(chunk.count for chunk in chunks))
            done += len(scheduler.advance(chunks, time))
        return done / max(1, time)

    return max(budgets, key=pace)


class SimulatedSequence(ActiveSequence):
    """A sequence whose generated tokens stay zeros."""
