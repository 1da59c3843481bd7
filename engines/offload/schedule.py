"""A pass over the layers as data: operations with resources and dependencies, for an executor or a simulator.

`row` and `zigzag` run blocks of sequences in step, row one batch a pass and zigzag several; `sweep` runs one batch
of whatever is at hand. So what differs between schedules is who shares a pass (batching.py); inside a pass the
order is always this: each weight block is loaded once and multiplied for all batches at once, and where a matrix is
done each batch runs on by itself to the next. Source: FlexGen (Sheng et al. 2023), section 4.2 and algorithm 1, at the
grain of a block instead of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Resource = Literal["disk", "compute"]


@dataclass(frozen=True)
class Op:
    """One operation of a pass.

    `load`: weight block `block` comes from disk into a slot. `multiply`: the block meets the rows of all batches.
    `run`: batch `batch` goes on to its next need of weights, from its start (block -1: embedding) or after the last
    block of a matrix. `after`: indices, in the same pass, of the operations that must be done before; operations of
    one resource also keep their order.
    """

    kind: Literal["load", "multiply", "run"]
    resource: Resource
    block: int
    batch: int
    after: tuple[int, ...]


def pass_ops(streamed: Sequence[bool], last: Sequence[bool], batches: int, slots: int) -> list[Op]:
    """The operations of one pass of `batches` batches over weight blocks.

    `streamed`: which blocks are on disk; `last`: which are the last of their matrix. A load waits until the slot of
    the block `slots` streamed blocks before is free: after its product.
    """
    ops = [Op("run", "compute", -1, k, ()) for k in range(batches)]
    needs = tuple(range(batches))  # of the next product: all batches' rows, or the product before
    freed: list[int] = []  # by streamed block, the operation that frees its slot
    for block, (on_disk, ends) in enumerate(zip(streamed, last, strict=True)):
        if on_disk:
            ops.append(Op("load", "disk", block, -1, (freed[-slots],) if len(freed) >= slots else ()))
            needs = (*needs, len(ops) - 1)
        ops.append(Op("multiply", "compute", block, -1, needs))
        needs = (len(ops) - 1,)
        if on_disk:
            freed.append(len(ops) - 1)
        if ends:
            ops += [Op("run", "compute", block, k, needs) for k in range(batches)]
            needs = tuple(range(len(ops) - batches, len(ops)))
    return ops
