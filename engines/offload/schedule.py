"""A pass over the layers as data: operations with resources and dependencies, for an executor or a simulator.

`row` and `zigzag` run blocks of sequences in step, row one batch a pass and zigzag several; `sweep` runs one batch
of whatever is at hand. So what differs between schedules is who shares a pass (batching.py); inside a pass the
order is always this: each weight block is loaded once and used by every batch before the next one's turn.
Source: FlexGen (Sheng et al. 2023), section 4.2 and algorithm 1, at the grain of a block instead of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Resource = Literal["disk", "compute"]


@dataclass(frozen=True)
class Op:
    """One operation of a pass.

    `start`: a batch runs up to its first need of weights (embedding). `load`: weight block `block` comes from
    disk into a slot. `compute`: batch `batch` uses the block and runs on to its next need. `after`: indices, in
    the same pass, of the operations that must be done before; operations of one resource also keep their order.
    """

    kind: Literal["start", "load", "compute"]
    resource: Resource
    block: int
    batch: int
    after: tuple[int, ...]


def pass_ops(streamed: Sequence[bool], batches: int, slots: int, cast: bool) -> list[Op]:
    """The operations of one pass of `batches` batches over weight blocks, of which those `streamed` are on disk.

    A load waits until the slot of the block `slots` streamed blocks before is free: after the last batch's use of
    it or, where blocks are `cast` to another dtype, after the first, which begins with the cast.
    """
    ops: list[Op] = [Op("start", "compute", -1, k, ()) for k in range(batches)]
    latest = list(range(batches))  # by batch, its last operation
    last_uses: list[int] = []  # by streamed block, the operation that frees its slot
    for block, on_disk in enumerate(streamed):
        needed: tuple[int, ...] = ()
        if on_disk:
            freed = (last_uses[-slots],) if len(last_uses) >= slots else ()
            ops.append(Op("load", "disk", block, -1, freed))
            needed = (len(ops) - 1,)
        for k in range(batches):
            ops.append(Op("compute", "compute", block, k, (*needed, latest[k])))
            latest[k] = len(ops) - 1
        if on_disk:
            last_uses.append(len(ops) - (batches if cast else 1))
    return ops
