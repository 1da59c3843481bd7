"""What goes where: memory for weights, cache and work within the budget, decided before anything is loaded."""

from __future__ import annotations

import math

from engines.common.work_memory import SLACK_BYTES
from engines.offload.memory.kv_blocks import STAGES, blocks_for, kv_block_bytes, record_bytes
from engines.offload.memory.plan import (
    KEPT_SHARE,
    ActivationMemory,
    MemoryPlan,
    MemoryRequest,
    evenly,
    largest,
    mib,
    slots_within,
)
from harness.api import InfeasibleError, ModelShape, OffloadPolicy

#: The share that the allocator keeps of what a batch computes in: beside 50 MB of it, 30 came and went from one run to
#: the next.
_KEPT_WORK = 3 / 4
#: Prompt tokens of a batch and pass where the policy does not say.
_CHUNK = (32, 512)
#: As in kernels/csrc/attention.cpp: kScoreRows, prompt rows whose scores are held at once, and a panel's kWidth.
_BLOCK, _WIDTH = 48, 16


def plan_host_memory(demand: MemoryRequest, policy: OffloadPolicy, budget: int | None) -> MemoryPlan:
    """The plan for `policy` within `budget` bytes of host memory (None: no limit).

    Blocks of sequences must fit whole; a sweep runs as many sequences as fit, up to its batch size. What is left
    over keeps weights resident, unless the policy says how many. On a host without a device its RAM is the device
    tier too. Raises InfeasibleError with the numbers and the nearest batch that would fit.
    """
    return _Planner(demand, policy, budget).plan()


def attention_memory(shape: ModelShape, longest: int, threads: int) -> tuple[int, int]:
    """Bytes that the compiled kernel of attention holds beside its operands, and for each prompt row of a pass.

    For sequences of `longest` tokens.
    """
    return threads * 4 * longest * (2 * -(-shape.head_dim // _WIDTH) * _WIDTH + _BLOCK), 0


class _Planner:
    """One plan in the making."""

    def __init__(self, demand: MemoryRequest, policy: OffloadPolicy, budget: int | None) -> None:
        self._demand = demand
        self._policy = policy
        self._budget = budget
        self._sweep = policy.schedule == "sweep"
        shape = demand.shape
        self._on_disk = 0.0 if policy.cache is None else policy.cache[2]
        block = kv_block_bytes(shape, demand.cache)
        # a block on disk is in memory a few layers at a time
        staged = STAGES * record_bytes(shape, demand.cache)
        self._block_bytes = math.ceil((1 - self._on_disk) * block + self._on_disk * staged)
        span = max(b.span for b in demand.tiles)
        self._slots = slots_within(budget, span)
        self._ring = self._slots * span
        self._work = ActivationMemory.within(budget, demand, policy, _CHUNK)
        self._other = demand.small_bytes + demand.cast_bytes + SLACK_BYTES + int((budget or 0) * KEPT_SHARE)
        self._weights = sum(b.nbytes for b in demand.tiles)
        self._asked = None if policy.weights is None else int((policy.weights[0] + policy.weights[1]) * self._weights)

    def plan(self) -> MemoryPlan:
        wanted = self._policy.block_size
        if self._budget is None:
            blocks = wanted * blocks_for(self._demand.max_sequence)
            held = self._weights if self._asked is None else self._asked
            return self._finished(blocks, wanted, held, "no limit")
        sequences = largest(wanted, self._fits)
        if sequences < self._fewest(wanted):
            raise InfeasibleError(self._words(wanted), {"host": self._least(wanted) - self._budget})
        room = (self._budget - self._fixed(sequences)) // self._block_bytes
        blocks = min(sequences * blocks_for(self._demand.max_sequence), room)
        left = self._budget - self._fixed(sequences) - blocks * self._block_bytes
        return self._finished(blocks, sequences, left if self._asked is None else self._asked, f"{mib(left)} left")

    def _fixed(self, sequences: int) -> int:
        """Everything but the cache and what is left for weights."""
        return self._work.bytes(sequences) + self._kept(sequences) + self._ring + self._other + (self._asked or 0)

    def _kept(self, sequences: int) -> int:
        """What the allocator keeps of one batch's work while it serves the next."""
        return 0 if self._budget is None else int(_KEPT_WORK * self._work.bytes(sequences) / self._work.batches)

    def _fits(self, sequences: int) -> bool:
        assert self._budget is not None
        blocks = self._demand.blocks(sequences, self._sweep)
        return self._fixed(sequences) + blocks * self._block_bytes <= self._budget

    def _finished(self, blocks: int, sequences: int, held: int, note: str) -> MemoryPlan:
        resident = evenly(self._demand.tiles, range(len(self._demand.tiles)), held)
        work, other = self._work.bytes(sequences), self._other + self._kept(sequences)
        kept = sum(self._demand.tiles[i].nbytes for i in resident)
        parts = {
            "cache": blocks * self._block_bytes,
            "work": work,
            "ring": self._ring,
            "resident": kept,
            "other": other,
        }
        words = " + ".join(f"{name} {mib(nbytes)}" for name, nbytes in parts.items())
        on_disk = round(blocks * self._on_disk)
        words = f"host memory: {words}; {note}"
        whole = sum(parts.values())
        one = self._work
        each = one.chunk * (one.row + one.logits) if self._budget is None else work // one.batches
        return MemoryPlan(blocks - on_disk, on_disk, sequences, resident, self._slots, one.chunk, each, one.row,
                          one.logits, whole, words)  # fmt: skip

    def _fewest(self, wanted: int) -> int:
        """Sequences that must fit for any to run."""
        return 1 if self._sweep else wanted

    def _least(self, wanted: int) -> int:
        """Bytes without which none runs."""
        least = self._fewest(wanted)
        return self._fixed(least) + least * blocks_for(self._demand.max_sequence) * self._block_bytes

    def _words(self, wanted: int) -> str:
        """Why `wanted` sequences do not fit, and what would."""
        assert self._budget is not None
        least = self._fewest(wanted)
        cache = least * blocks_for(self._demand.max_sequence) * self._block_bytes
        batches = self._policy.num_gpu_batches
        size = 0 if self._sweep else largest(wanted // batches, lambda n: self._fits(n * batches))
        hint = f"gpu_batch_size {size} would fit" if size else "use a larger budget"
        held = ""
        if self._asked:
            held = f", weights {mib(self._asked)}"
            hint += ", or hold a smaller part of the weights (policy.weights)"
        return (
            f"offload needs {mib(self._least(wanted))} for {least} sequences of {self._demand.max_sequence} "
            f"tokens (cache {mib(cache)}, work {mib(self._work.bytes(least))}, ring {mib(self._ring)}, other "
            f"{mib(self._other + self._kept(least))}{held}); the budget is {mib(self._budget)}; {hint}"
        )
