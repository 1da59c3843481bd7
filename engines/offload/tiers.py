"""What goes where: memory for weights, cache and work within the budget, decided before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engines.offload.layout import Block
from engines.offload.pages import STAGES, page_bytes, pages_for, record_bytes
from engines.offload.storage import Storage
from harness.api import InfeasibleError, ModelShape, OffloadPolicy

#: Buffers of the matrix library and thread stacks: measured up to 40 MB; and for what the allocator keeps, the share of
#: a budget (of a warm-up it kept 38 MB in 1.2 GiB) and of what a batch computes in (beside 50 MB of it, 30 came and
#: went from one run to the next).
SLACK_BYTES = 64 << 20
KEPT_SHARE, _KEPT_WORK = 1 / 32, 3 / 4
#: Slots of the ring through which weights stream: enough to keep the disk busy while a pass ends, and the share
#: of a budget that may go to them.
SLOTS = (4, 16)
RING_SHARE = 1 / 16
#: Prompt tokens of a batch and pass where the policy does not say, and the share of a budget for their activations.
_CHUNK = (32, 512)
WORK_SHARE = 1 / 8
#: As in kernels/attention.cpp: rows whose scores are held together, and columns of a panel.
_BLOCK, _WIDTH = 48, 16


@dataclass(frozen=True)
class Demand:
    """What is to be placed: weight blocks, bytes of `small` tensors, the cache, and the lengths of sequences.

    `compute_bytes`: of an activation's value. `cast_bytes`: of the largest copy that is made of a block before its
    product, 0 where there is none. `cache`: how keys and values are stored. `attention`: bytes that attention holds
    beside its operands, and for each prompt row of a pass.

    A sequence has at most `max_sequence` tokens, and `mean_sequence` on average over its life.
    """

    shape: ModelShape
    blocks: Sequence[Block]
    cache: Storage
    compute_bytes: int
    cast_bytes: int
    small: int
    attention: tuple[int, int]
    max_sequence: int
    mean_sequence: int


@dataclass(frozen=True)
class Plan:
    """Cache pages in memory and on disk, sequences that run together, resident weight blocks, ring slots, prompt
    tokens a pass.

    `bytes` is what all of it takes. `work`: of it what a batch computes in, of which a token of a pass takes `row`, and
    one that meets the head `logits` beside. With a device its memory is what `pages`, `resident` blocks, slots and work
    are in; `host_pages` and the blocks `pinned` are in pinned host memory, of `pinned_bytes` with what passes through.
    """

    pages: int
    disk_pages: int
    sequences: int
    resident: frozenset[int]
    slots: int
    chunk: int
    work: int
    row: int
    logits: int
    bytes: int
    note: str
    host_pages: int = 0
    pinned: frozenset[int] = frozenset()
    pinned_bytes: int = 0

    def scored(self, share: float) -> tuple[int, int]:
        """Tokens of a batch and pass, and how many of them may meet the head, where such a share of all tokens do."""
        tokens = max(3, min(self.chunk, int(self.work / (self.row + share * self.logits))))
        return tokens, max(3, (self.work - tokens * self.row) // self.logits)


def place(demand: Demand, policy: OffloadPolicy, budget: int | None) -> Plan:
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

    def __init__(self, demand: Demand, policy: OffloadPolicy, budget: int | None) -> None:
        self._demand = demand
        self._policy = policy
        self._budget = budget
        self._sweep = policy.schedule == "sweep"
        shape = demand.shape
        # of one token: the residual stream, its norm, queries, keys, values and attention's output, and the
        # feed-forward's input, activation and (gated) product
        self._row = (8 * shape.hidden + 3 * shape.ffn) * demand.compute_bytes
        # of one row that meets the head: its logits and a copy
        self._logits = 2 * shape.vocab * 4
        self._on_disk = 0.0 if policy.cache is None else policy.cache[2]
        page = page_bytes(shape, demand.cache)
        # a page on disk is in memory a few layers at a time
        staged = STAGES * record_bytes(shape, demand.cache)
        self._page = math.ceil((1 - self._on_disk) * page + self._on_disk * staged)
        largest = max(b.span for b in demand.blocks)
        rows = None if budget is None else budget * WORK_SHARE / policy.num_gpu_batches / self._row
        self.slots = within(SLOTS, None if budget is None else budget * RING_SHARE / largest)
        most = policy.gpu_batch_size * demand.max_sequence
        self.chunk = min(policy.prefill_chunk or within(_CHUNK, rows), most)
        self.ring = self.slots * largest
        self._other = demand.small + demand.cast_bytes + SLACK_BYTES + int((budget or 0) * KEPT_SHARE)
        self._weights = sum(b.nbytes for b in demand.blocks)
        self._asked = None if policy.weights is None else int((policy.weights[0] + policy.weights[1]) * self._weights)

    def plan(self) -> Plan:
        wanted = self._policy.block_size
        if self._budget is None:
            pages = wanted * pages_for(self._demand.max_sequence)
            held = self._weights if self._asked is None else self._asked
            return self._finished(pages, wanted, held, "no limit")
        sequences = largest(wanted, self._sweep_fits if self._sweep else self._block_fits)
        if sequences < self._fewest(wanted):
            raise InfeasibleError(self._words(wanted), {"host": self._least(wanted) - self._budget})
        room = (self._budget - self._fixed(sequences)) // self._page
        pages = min(sequences * pages_for(self._demand.max_sequence), room)
        left = self._budget - self._fixed(sequences) - pages * self._page
        return self._finished(pages, sequences, left if self._asked is None else self._asked, f"{mib(left)} left")

    def _fixed(self, sequences: int) -> int:
        """Everything but the cache and what is left for weights."""
        return self._work(sequences) + self._kept(sequences) + self.ring + self._other + (self._asked or 0)

    def _kept(self, sequences: int) -> int:
        """What the allocator keeps of one batch's work while it serves the next."""
        return 0 if self._budget is None else int(_KEPT_WORK * self._work(sequences) / self._policy.num_gpu_batches)

    def _work(self, sequences: int) -> int:
        """Activations and logits of the batches in flight, and what attention holds."""
        batches = self._policy.num_gpu_batches
        fixed, row = self._demand.attention
        size = -(-sequences // batches)
        return batches * ((size + self.chunk) * self._row + size * self._logits) + fixed + self.chunk * row

    def _block_fits(self, sequences: int) -> bool:
        """Whether a block can be cached to its end."""
        assert self._budget is not None
        pages = sequences * pages_for(self._demand.max_sequence)
        return self._fixed(sequences) + pages * self._page <= self._budget

    def _sweep_fits(self, sequences: int) -> bool:
        """Whether so many sequences of different ages can be cached, and one to its end."""
        assert self._budget is not None
        pages = max(pages_for(self._demand.max_sequence), sequences * pages_for(self._demand.mean_sequence))
        return self._fixed(sequences) + pages * self._page <= self._budget

    def _finished(self, pages: int, sequences: int, held: int, note: str) -> Plan:
        resident = evenly(self._demand.blocks, range(len(self._demand.blocks)), held)
        work, other = self._work(sequences), self._other + self._kept(sequences)
        kept = sum(self._demand.blocks[i].nbytes for i in resident)
        parts = {"cache": pages * self._page, "work": work, "ring": self.ring, "resident": kept, "other": other}
        words = " + ".join(f"{name} {mib(nbytes)}" for name, nbytes in parts.items())
        on_disk = round(pages * self._on_disk)
        words = f"host memory: {words}; {note}"
        whole = sum(parts.values())
        least = work // self._policy.num_gpu_batches
        each = self.chunk * (self._row + self._logits) if self._budget is None else least
        return Plan(pages - on_disk, on_disk, sequences, resident, self.slots, self.chunk, each, self._row,
                    self._logits, whole, words)  # fmt: skip

    def _fewest(self, wanted: int) -> int:
        """Sequences that must fit for any to run."""
        return 1 if self._sweep else wanted

    def _least(self, wanted: int) -> int:
        """Bytes without which none runs."""
        least = self._fewest(wanted)
        return self._fixed(least) + least * pages_for(self._demand.max_sequence) * self._page

    def _words(self, wanted: int) -> str:
        """Why `wanted` sequences do not fit, and what would."""
        assert self._budget is not None
        least = self._fewest(wanted)
        cache = least * pages_for(self._demand.max_sequence) * self._page
        batches = self._policy.num_gpu_batches
        size = 0 if self._sweep else largest(wanted // batches, lambda n: self._block_fits(n * batches))
        hint = f"gpu_batch_size {size} would fit" if size else "use a larger budget"
        held = ""
        if self._asked:
            held = f", weights {mib(self._asked)}"
            hint += ", or hold a smaller part of the weights (policy.weights)"
        return (
            f"offload needs {mib(self._least(wanted))} for {least} sequences of {self._demand.max_sequence} "
            f"tokens (cache {mib(cache)}, work {mib(self._work(least))}, ring {mib(self.ring)}, other "
            f"{mib(self._other + self._kept(least))}{held}); the budget is {mib(self._budget)}; {hint}"
        )


def evenly(blocks: Sequence[Block], among: Iterable[int], nbytes: int) -> frozenset[int]:
    """As many blocks `among` some as `nbytes` hold, evenly over the pass, so that the others come at an even pace."""
    places = list(among)
    share = nbytes / max(1, sum(blocks[i].nbytes for i in places))
    chosen, taken, seen = set(), 0, 0
    for i in places:
        block = blocks[i]
        seen += block.nbytes
        if taken + block.nbytes <= share * seen:
            chosen.add(i)
            taken += block.nbytes
    return frozenset(chosen)


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that `fits`, which is taken to be monotone; 0 if 1 does not."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def within(limits: tuple[int, int], wanted: float | None) -> int:
    """`wanted` between two limits; the upper one where anything goes."""
    low, high = limits
    return high if wanted is None else max(low, min(high, int(wanted)))


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
