"""Runs a job in virtual time, with the engine's own schedulers: on one simulated machine, or through the stages of a
pipeline, one each."""

from collections.abc import Sequence
from dataclasses import replace

from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.memory.plan import MemoryPlan
from engines.offload.memory.rows import io_compute_balance_rows
from engines.offload.prefill_budget import SimulatedSequence, job_budget, make_scheduler
from engines.offload.scheduled_chunk import split
from engines.offload.scheduler import Scheduler
from engines.planning.simulator import Simulator, Work
from engines.planning.virtual_pipeline import Group, VirtualLink, Visit, run_pipeline
from harness.api import HarnessError, OffloadPolicy

#: Rows of the product whose rate stands for the arithmetic in the balance of a pass.
_BALANCE_ROWS = 256


class ScheduledGroup(Group[Work]):
    """The sequences of one scheduler, whose batches are split into the nano-batches of a `policy`."""

    def __init__(self, scheduler: Scheduler[SimulatedSequence], policy: OffloadPolicy) -> None:
        self.scheduler = scheduler
        self._nano = policy.nano_count, policy.nano_order, policy.cpu_attention

    @property
    def next_arrival_s(self) -> float | None:
        return self.scheduler.next_arrival_s

    def begin(self, now: float) -> Work | None:
        """Raises HarnessError if the KV cache cannot hold any of the sequences that are left."""
        arrival = self.scheduler.next_arrival_s
        if arrival is None or arrival > now:
            return None
        batches = [part for batch in self.scheduler.next_pass(now) for part in split(batch, *self._nano)]
        if not batches:
            raise HarnessError("no sequence can continue: the KV cache is too small for the admitted sequences")
        return batches

    def end(self, work: Work, now: float) -> None:
        self.scheduler.advance((chunk for batch in work for chunk in batch), now)


def agreed_plan(stages: Sequence[Simulator]) -> tuple[MemoryPlan, int]:
    """What all stages can do: the last one's plan with as many sequences and prompt tokens a pass as the smallest of
    them has, and so many KV blocks."""
    plans = [stage.placed.plan for stage in stages]
    sequences, chunk = min(plan.sequences for plan in plans), min(plan.chunk for plan in plans)
    blocks = min(plan.kv_blocks + plan.disk_kv_blocks for plan in plans)
    return replace(plans[-1], sequences=sequences, chunk=chunk), blocks


def run_job(
    stages: Sequence[Simulator], sequences: Sequence[SimulatedSequence], links: Sequence[VirtualLink] = (),
    groups: int = 1, row_bytes: float = 0.0,
) -> list[Visit]:  # fmt: skip
    """Runs all sequences, in so many groups, through stages in their order; each records the times of its tokens.

    `links`: from each stage to the next and from the last to the first, as in run_pipeline; none of them takes time if
    there are none. `row_bytes`: of one token's hidden states on a link.

    Raises HarnessError if the KV cache cannot hold any of the sequences that are left.
    """
    last = stages[-1]
    whole, blocks = agreed_plan(stages)
    offloaded = max(0, blocks - whole.kv_blocks)
    plan = replace(whole, sequences=-(-whole.sequences // groups))
    policy = replace(last.policy, gpu_batch_size=-(-last.policy.gpu_batch_size // groups))
    disk_read, flops = last.machine.profile.disk.read, last.machine.flops(_BALANCE_ROWS)
    wait_s = sum(link.delay_s for link in links)
    balance = io_compute_balance_rows(last.placed.pass_bytes, disk_read, flops, last.placed.shape, wait_s)
    work = [(sequence.tokens, sequence.steps_left) for sequence in sequences[: -(-len(sequences) // groups)]]
    formed = []
    for i in range(groups):
        manager = BlockManager(blocks, offloaded, part=(i, groups))
        budget = job_budget(work, manager.num_blocks, policy, plan, balance, plan.chunk)
        scheduler = make_scheduler(sequences[i::groups], manager, policy, plan, budget, plan.chunk)
        formed.append(ScheduledGroup(scheduler, policy))

    def nbytes(work: Work) -> float:
        return row_bytes * sum(chunk.count for batch in work for chunk in batch)

    visits = run_pipeline(stages, links or [VirtualLink() for _ in stages], formed, nbytes)
    last.timeline.prefix_hit_tokens = sum(group.scheduler.prefix_hit_tokens for group in formed)
    return visits
