"""A pass over the layers as data: operations with resources and dependencies, for an executor or a simulator.

`row` and `zigzag` run blocks of sequences in step, row one batch a pass and zigzag several; `sweep` runs one batch
of whatever is at hand. So what differs between schedules is who shares a pass (batching.py); inside a pass the
order is always this: each weight block is loaded once and multiplied for all batches at once, and where a matrix is
done each batch runs on by itself to the next. Source: FlexGen (Sheng et al. 2023), section 4.2 and algorithm 1, at the
grain of a block instead of a layer.

Nano-batches (NanoFlow, Zhu et al. 2025, section 3) are parts of a sweep's batch that take turns around attention: one
attends while another's products run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Resource = Literal["disk", "compute", "attention"]


@dataclass(frozen=True)
class Op:
    """One operation of a pass.

    `load`: weight block `block` comes from disk into a slot. `multiply`: the block meets the rows of batch `batch`, or
    of all where that is -1. `run`: the batch goes on to its next need of weights, or of attention where that takes
    turns: from its start (block -1: embedding), after the last block of a matrix, or after its attention. `attend`:
    the batch's attention, beside what else is computed. `after`: indices, in the same pass, of the operations that
    must be done before; operations of one resource also keep their order.
    """

    kind: Literal["load", "multiply", "run", "attend"]
    resource: Resource
    block: int
    batch: int
    after: tuple[int, ...]


@dataclass(frozen=True)
class Turn:
    """Blocks around an attention that each batch multiplies by itself: matrices `before` it, and the one `after` it."""

    before: range
    after: range


def turns_of(
    spans: Sequence[range], groups: Sequence[str], attends: Sequence[int], streamed: Sequence[bool], slots: int
) -> list[Turn]:
    """The turns of a pass over matrices whose blocks are `spans` and that belong to layers by `groups`.

    `attends` is how many matrices come before each attention. A layer whose `streamed` blocks would fill the ring's
    `slots`, as they stay there until the last batch is done with them, takes none.
    """
    found = []
    for end in attends:
        start = end
        while start > 0 and groups[start - 1] == groups[end - 1] and start - 1 not in attends:
            start -= 1
        if start == end or end == len(spans):
            continue
        turn = Turn(range(spans[start].start, spans[end - 1].stop), spans[end])
        most = max(sum(streamed[block] for block in part) for part in (turn.before, turn.after))
        if most < max(1, slots):
            found.append(turn)
    return found


def pass_ops(
    streamed: Sequence[bool], last: Sequence[bool], batches: int, slots: int, turns: Sequence[Turn] = ()
) -> list[Op]:
    """The operations of one pass of `batches` batches over weight blocks.

    `streamed`: which blocks are on disk; `last`: which are the last of their matrix. A load waits until the slot of
    the block `slots` streamed blocks before is free: after its last product.
    """
    return _Pass(streamed, last, batches, slots).ops_with({turn.before.start: turn for turn in turns})


class _Pass:
    """One pass in the making."""

    def __init__(self, streamed: Sequence[bool], last: Sequence[bool], batches: int, slots: int) -> None:
        self._streamed = streamed
        self._last = last
        self._batches = range(batches)
        self._slots = slots
        self._ops: list[Op] = []
        self._loads: dict[int, int] = {}  # by block, the operation that loads it
        self._freed: list[int] = []  # by streamed block, the operation that frees its slot

    def ops_with(self, turns: dict[int, Turn]) -> list[Op]:
        came = [self._add("run", "compute", -1, k, ()) for k in self._batches]
        needs = tuple(came)  # of the next product: all batches' rows, or the product before
        block = 0
        while block < len(self._last):
            if block in turns:
                turn = turns[block]
                needs = tuple(self._take_turns(turn, came))
                block, came = turn.after.stop, list(needs)
                continue
            needs = (self._multiply(block, -1, needs),)
            if self._last[block]:
                came = [self._add("run", "compute", block, k, needs) for k in self._batches]
                needs = tuple(came)
            block += 1
        return self._ops

    def _take_turns(self, turn: Turn, came: Sequence[int]) -> list[int]:
        """Returns, by batch, the operation after which it has come to the matrix after the turn."""
        attended = []
        for k in self._batches:
            at = self._alone(turn.before, k, came[k])
            attended.append(self._add("attend", "attention", turn.before.stop - 1, k, (at,)))
        found = []
        for k in self._batches:
            back = self._add("run", "compute", turn.before.stop - 1, k, (attended[k],))
            found.append(self._alone(turn.after, k, back))
        return found

    def _alone(self, blocks: range, batch: int, after: int) -> int:
        """One batch multiplies some matrices and runs on."""
        for block in blocks:
            after = self._multiply(block, batch, (after,))
            if self._last[block]:
                after = self._add("run", "compute", block, batch, (after,))
        return after

    def _multiply(self, block: int, batch: int, needs: tuple[int, ...]) -> int:
        if self._streamed[block]:
            if block not in self._loads:
                due = len(self._loads) - self._slots
                free = (self._freed[due],) if due >= 0 else ()
                self._loads[block] = self._add("load", "disk", block, -1, free)
            needs = (*needs, self._loads[block])
        done = self._add("multiply", "compute", block, batch, needs)
        if self._streamed[block] and batch in (-1, self._batches[-1]):
            self._freed.append(done)
        return done

    def _add(
        self, kind: Literal["load", "multiply", "run", "attend"], resource: Resource, block: int, batch: int,
        after: tuple[int, ...],
    ) -> int:  # fmt: skip
        self._ops.append(Op(kind, resource, block, batch, after))
        return len(self._ops) - 1
