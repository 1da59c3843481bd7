"""A pass over the layers as data: operations with resources and dependencies, for an executor or a simulator.

`row` and `zigzag` run blocks of sequences in step, row one batch a pass and zigzag several; `sweep` runs one batch
of whatever is at hand. So what differs between schedules is who shares a pass (batching.py); inside a pass the
order is always this: each weight tile is loaded once and multiplied for all batches at once, and where a matrix is
done each batch runs on by itself to the next. Source: FlexGen (Sheng et al. 2023), section 4.2 and algorithm 1, at the
grain of a tile instead of a layer.

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

    `load`: weight tile `tile` comes from disk into a slot. `multiply`: the tile meets the rows of batch `batch`, or
    of all where that is -1. `run`: the batch goes on to its next need of weights, or of attention where that takes
    overlaps: from its start (tile -1: embedding), after the last tile of a matrix, or after its attention. `attend`:
    the batch's attention, beside what else is computed. `after`: indices, in the same pass, of the operations that
    must be done before; operations of one resource also keep their order.
    """

    kind: Literal["load", "multiply", "run", "attend"]
    resource: Resource
    tile: int
    batch: int
    after: tuple[int, ...]


@dataclass(frozen=True)
class AttentionOverlap:
    """Tiles around an attention that each batch multiplies by itself: matrices `before` it, and the one `after` it."""

    before: range
    after: range


def attention_overlaps(
    spans: Sequence[range], groups: Sequence[str], attends: Sequence[int], streamed: Sequence[bool], slots: int
) -> list[AttentionOverlap]:
    """The turns of a pass over matrices whose tiles are `spans` and that belong to layers by `groups`.

    `attends` is how many matrices come before each attention. A layer whose `streamed` tiles would fill the ring's
    `slots`, as they stay there until the last batch is done with them, takes none.
    """
    found = []
    for end in attends:
        start = end
        while start > 0 and groups[start - 1] == groups[end - 1] and start - 1 not in attends:
            start -= 1
        if start == end or end == len(spans):
            continue
        overlap = AttentionOverlap(range(spans[start].start, spans[end - 1].stop), spans[end])
        most = max(sum(streamed[tile] for tile in part) for part in (overlap.before, overlap.after))
        if most < max(1, slots):
            found.append(overlap)
    return found


def pass_ops(
    streamed: Sequence[bool], last: Sequence[bool], batches: int, slots: int, overlaps: Sequence[AttentionOverlap] = ()
) -> list[Op]:
    """The operations of one pass of `batches` batches over weight tiles.

    `streamed`: which tiles are on disk; `last`: which are the last of their matrix. A load waits until the slot of
    the tile `slots` streamed tiles before is free: after its last product.
    """
    return _Pass(streamed, last, batches, slots).ops_with({overlap.before.start: overlap for overlap in overlaps})


class _Pass:
    """One pass in the making."""

    def __init__(self, streamed: Sequence[bool], last: Sequence[bool], batches: int, slots: int) -> None:
        self._streamed = streamed
        self._last = last
        self._batches = range(batches)
        self._slots = slots
        self._ops: list[Op] = []
        self._loads: dict[int, int] = {}  # by tile, the operation that loads it
        self._freed: list[int] = []  # by streamed tile, the operation that frees its slot

    def ops_with(self, overlaps: dict[int, AttentionOverlap]) -> list[Op]:
        came = [self._add("run", "compute", -1, k, ()) for k in self._batches]
        needs = tuple(came)  # of the next product: all batches' rows, or the product before
        tile = 0
        while tile < len(self._last):
            if tile in overlaps:
                overlap = overlaps[tile]
                needs = tuple(self._overlap(overlap, came))
                tile, came = overlap.after.stop, list(needs)
                continue
            needs = (self._multiply(tile, -1, needs),)
            if self._last[tile]:
                came = [self._add("run", "compute", tile, k, needs) for k in self._batches]
                needs = tuple(came)
            tile += 1
        return self._ops

    def _overlap(self, overlap: AttentionOverlap, came: Sequence[int]) -> list[int]:
        """Returns, by batch, the operation after which it has come to the matrix after the overlap."""
        attended = []
        for k in self._batches:
            at = self._alone(overlap.before, k, came[k])
            attended.append(self._add("attend", "attention", overlap.before.stop - 1, k, (at,)))
        found = []
        for k in self._batches:
            back = self._add("run", "compute", overlap.before.stop - 1, k, (attended[k],))
            found.append(self._alone(overlap.after, k, back))
        return found

    def _alone(self, tiles: range, batch: int, after: int) -> int:
        """One batch multiplies some matrices and runs on."""
        for tile in tiles:
            after = self._multiply(tile, batch, (after,))
            if self._last[tile]:
                after = self._add("run", "compute", tile, batch, (after,))
        return after

    def _multiply(self, tile: int, batch: int, needs: tuple[int, ...]) -> int:
        if self._streamed[tile]:
            if tile not in self._loads:
                due = len(self._loads) - self._slots
                free = (self._freed[due],) if due >= 0 else ()
                self._loads[tile] = self._add("load", "disk", tile, -1, free)
            needs = (*needs, self._loads[tile])
        done = self._add("multiply", "compute", tile, batch, needs)
        if self._streamed[tile] and batch in (-1, self._batches[-1]):
            self._freed.append(done)
        return done

    def _add(
        self, kind: Literal["load", "multiply", "run", "attend"], resource: Resource, tile: int, batch: int,
        after: tuple[int, ...],
    ) -> int:  # fmt: skip
        self._ops.append(Op(kind, resource, tile, batch, after))
        return len(self._ops) - 1
