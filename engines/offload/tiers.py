"""What goes where: memory for weights, cache and work within the budget, decided before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engines.offload.kv_cache import page_bytes, pages_for
from engines.offload.layout import Block
from harness.api import InfeasibleError, ModelShape, OffloadPolicy, UnsupportedError

#: Buffers of the matrix library, allocator remains, thread stacks: measured up to 40 MB.
SLACK_BYTES = 64 << 20
#: Slots of the ring through which weights stream: enough to keep the disk busy while a pass ends, and the share
#: of a budget that may go to them.
_SLOTS = (4, 16)
_RING_SHARE = 1 / 16
#: Prompt tokens of a batch and pass where the policy does not say, and the share of a budget for their activations.
_CHUNK = (32, 512)
_WORK_SHARE = 1 / 8


@dataclass(frozen=True)
class Demand:
    """What is to be placed. `small` and `cast` are bytes; `max_sequence` tokens of the longest sequence."""

    shape: ModelShape
    blocks: Sequence[Block]
    compute_bytes: int
    cache_bytes: int
    small: int
    cast: int
    max_sequence: int


@dataclass(frozen=True)
class Placement:
    """The plan: cache pages, resident weight blocks, ring slots, and bytes by purpose for the record."""

    pages: int
    sequences: int
    resident: frozenset[int]
    slots: int
    chunk: int
    notes: tuple[str, ...]


def place(demand: Demand, policy: OffloadPolicy, budget: int | None) -> Placement:
    """The plan for `policy` within `budget` bytes of host memory (None: no limit).

    Blocks of a block schedule must fit whole; a sweep runs as many sequences as fit, up to its batch size. What
    is left over keeps weights resident, unless the policy says how many. Raises InfeasibleError with the numbers
    and the nearest policy that would fit; UnsupportedError for a device tier, of which this host has none.
    """
    for name in ("weights", "cache", "activations"):
        asked = getattr(policy, name)
        if asked is not None and (asked[0] or (name != "weights" and asked != (0.0, 1.0, 0.0))):
            raise UnsupportedError(f"policy.{name} is {list(asked)}; on this host only the host tier holds {name}")
    largest = max(b.span for b in demand.blocks)
    slots = _within(_SLOTS, None if budget is None else budget * _RING_SHARE / largest)
    sweep = policy.schedule == "sweep"
    batches = policy.num_gpu_batches if policy.schedule == "zigzag" else 1
    rows = None if budget is None else budget * _WORK_SHARE / batches / _row_bytes(demand)
    chunk = min(policy.prefill_chunk or _within(_CHUNK, rows), policy.gpu_batch_size * demand.max_sequence)
    wanted = policy.gpu_batch_size * batches
    per_sequence = pages_for(demand.max_sequence)
    page = page_bytes(demand.shape, demand.cache_bytes)
    total = sum(b.nbytes for b in demand.blocks)
    if budget is None:
        count = len(demand.blocks) if policy.weights is None else round(policy.weights[1] * len(demand.blocks))
        resident = _spread(demand.blocks, count)
        return Placement(wanted * per_sequence, wanted, resident, slots, chunk, ("no limit",))

    asked_resident = None if policy.weights is None else int(policy.weights[1] * total)
    work = _work_bytes(demand, policy.gpu_batch_size, chunk, batches)
    ring = slots * largest
    fixed = work + ring + demand.small + demand.cast + SLACK_BYTES + (asked_resident or 0)
    fit = max(0, budget - fixed) // (page * per_sequence)
    if fit < (1 if sweep else wanted):
        least = fixed + (1 if sweep else wanted) * page * per_sequence
        hint = f"gpu_batch_size {fit // batches} would fit" if fit >= batches else "use a larger budget"
        raise InfeasibleError(
            f"offload needs {_mib(least)} for {1 if sweep else wanted} sequences of {demand.max_sequence} tokens "
            f"(cache {_mib(least - fixed)}, work {_mib(work)}, ring {_mib(ring)}, "
            f"other {_mib(fixed - work - ring)}); the budget is {_mib(budget)}; {hint}"
        )
    # a sweep's sequences are at different ages: with pages for `fit` at their longest, more of them run
    pages = min(wanted * per_sequence, (budget - fixed) // page) if sweep else wanted * per_sequence
    left = budget - fixed - pages * page + (asked_resident or 0)
    resident = _resident(demand.blocks, left if asked_resident is None else asked_resident)
    held = sum(demand.blocks[i].nbytes for i in resident)
    notes = (
        f"budget {_mib(budget)} = cache {_mib(pages * page)} ({pages} pages) + weights {_mib(held)} + ring {_mib(ring)}"
        f" + work {_mib(work)} + small {_mib(demand.small + demand.cast)} + slack {_mib(SLACK_BYTES)}"
        f" + unused {_mib(budget - fixed + (asked_resident or 0) - pages * page - held)}",
    )
    return Placement(pages, wanted, resident, slots, chunk, notes)


def _work_bytes(demand: Demand, size: int, chunk: int, batches: int) -> int:
    """Activations of `batches` passes in flight at their widest, and the logits with a copy."""
    return batches * ((size + chunk) * _row_bytes(demand) + 2 * size * demand.shape.vocab * 4)


def _row_bytes(demand: Demand) -> int:
    """Activations of one token: the residual stream, its norm, queries, keys, values and attention's output, and the
    feed-forward's input, activation and (gated) product."""
    return (8 * demand.shape.hidden + 3 * demand.shape.ffn) * demand.compute_bytes


def _within(limits: tuple[int, int], wanted: float | None) -> int:
    """`wanted` between two limits; the upper one where anything goes."""
    low, high = limits
    return high if wanted is None else max(low, min(high, int(wanted)))


def _resident(blocks: Sequence[Block], nbytes: int) -> frozenset[int]:
    """As many blocks as `nbytes` hold."""
    average = sum(b.nbytes for b in blocks) / len(blocks)
    count = min(len(blocks), int(nbytes / average))
    while count and sum(blocks[i].nbytes for i in _spread(blocks, count)) > nbytes:
        count -= 1
    return _spread(blocks, count)


def _spread(blocks: Sequence[Block], count: int) -> frozenset[int]:
    """`count` blocks evenly over the pass, so that the disk is asked for the rest at an even pace."""
    return frozenset(len(blocks) * i // count for i in range(count)) if count else frozenset()


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
