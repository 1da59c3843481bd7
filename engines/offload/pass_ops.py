"""One pass over the layers as a list of operations, which the executor runs and planning's simulator times.

`row` and `zigzag` run blocks of sequences in step, row one batch a pass and zigzag several; `sweep` runs one batch of
whatever is scheduled. Schedules differ only in who shares a pass (scheduler.py). Inside a pass the order is always the
same: each weight tile is loaded once and multiplied for all batches at once, and after the last tile of a matrix each
batch runs on to its next matrix. Source: FlexGen (Sheng et al. 2023), section 4.2 and algorithm 1, at the grain of a
tile instead of a layer.

Nano-batches (NanoFlow, Zhu et al. 2025, section 3) are parts of a sweep's batch that overlap attention: while one
attends, the products of another run, of the same layer or, by a NanoOrder, of the one before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from harness.api import NanoOrder

#: `Op.batch` of an operation that is for all batches of the pass together.
ALL = -1


@dataclass(frozen=True)
class Op:
    """One operation of a pass.

    `load`: the stream delivers weight tile `tile` to a slot of the ring. `multiply`: the tile is multiplied with the
    rows of `batches` batches from `batch` on, or of all batches; so are the tiles behind it, `count` in all, where none
    of them is loaded. `last`: no other product of the pass needs these tiles. `resume`: the batch runs on to its next
    product, or to its attention where that overlaps: from the embedding (tile -1), after the last tile of a matrix, or
    after its attention. `attend`: the batch's attention runs beside what follows.
    """

    kind: Literal["load", "multiply", "resume", "attend"]
    tile: int
    batch: int = ALL
    count: int = 1
    batches: int = 1
    last: bool = True

    def includes(self, batch: int) -> bool:
        """Whether it is for a batch."""
        return self.batch == ALL or self.batch <= batch < self.batch + self.batches


@dataclass(frozen=True)
class AttentionOverlap:
    """Tiles of a layer that nano-batches multiply by parts: of the matrices `before` its attention, of the one `after`
    it, and of each matrix in the `rest` of the layer."""

    before: range
    after: range
    rest: Sequence[range] = ()

    @property
    def stop(self) -> int:
        """The tile behind all of them."""
        return self.rest[-1].stop if self.rest else self.after.stop


def attention_overlaps(
    spans: Sequence[range], groups: Sequence[str], attends: Sequence[int], streamed: Sequence[bool], slots: int
) -> list[AttentionOverlap]:
    """The attentions of a pass that can overlap products.

    `spans` are the tiles of each matrix, `groups` the layers that matrices belong to; `attends`: how many matrices come
    before each attention. A layer is left out whose `streamed` tiles would fill the ring's `slots`: they stay there
    until the last batch has multiplied them.
    """
    overlaps, starts = [], []
    for end in attends:
        start = end
        while start > 0 and groups[start - 1] == groups[end - 1] and start - 1 not in attends:
            start -= 1
        starts.append(start)
    for start, end in zip(starts, attends, strict=True):
        if start == end or end == len(spans):
            continue
        stop = end + 1
        while stop < len(spans) and groups[stop] == groups[end - 1] and stop not in starts:
            stop += 1
        before = range(spans[start].start, spans[end - 1].stop)
        overlap = AttentionOverlap(before, spans[end], tuple(spans[end + 1 : stop]))
        held = max(sum(streamed[tile] for tile in tiles) for tiles in (overlap.before, overlap.after))
        if held < max(1, slots):
            overlaps.append(overlap)
    return overlaps


def pass_ops(
    streamed: Sequence[bool], spans: Sequence[range], batches: int, overlaps: Sequence[AttentionOverlap] = (),
    order: NanoOrder | None = None,
) -> list[Op]:  # fmt: skip
    """The operations of one pass of `batches` batches, in order.

    `streamed`: for each weight tile, whether it comes through the ring; `spans`: the tiles of each matrix; `order`: of
    the products in layers that overlap, for passes of as many batches as it has. A single batch has no products of
    others to overlap its attention with.
    """
    runs = {run[0].before.start: run for run in _runs(overlaps if batches > 1 else ())}
    span_at = {span.start: span for span in spans}
    loaded: set[int] = set()
    if order is None or order.nano_batches != batches:
        order = NanoOrder.apart(batches) if batches > 1 else None

    def multiply(span: range, of: range) -> list[Op]:
        """A matrix's tiles for some batches, which run on: those that are resident and follow each other in one
        operation."""
        ops, tile = list[Op](), span.start
        batch, count = (ALL, 1) if len(of) == batches else (of.start, len(of))
        while tile < span.stop:
            stop = tile + 1
            if streamed[tile]:
                ops += [Op("load", tile)] if tile not in loaded else []
                loaded.add(tile)
            else:
                while stop < span.stop and not streamed[stop]:
                    stop += 1
            ops.append(Op("multiply", tile, batch, stop - tile, count))
            tile = stop
        return ops + [Op("resume", span[-1], batch) for batch in of]

    def product(layer: AttentionOverlap, name: str, of: range) -> list[Op]:
        """Part of a layer's product, for some batches, and the attention around it."""
        if name == "KQV":
            ops, tile = list[Op](), layer.before.start
            while tile < layer.before.stop:
                ops += multiply(span_at[tile], of)
                tile = span_at[tile].stop
            return ops + [Op("attend", layer.before[-1], batch) for batch in of]
        if name == "O":
            return [Op("resume", layer.before[-1], batch) for batch in of] + multiply(layer.after, of)
        return [op for span in (layer.rest[:-1] if name == "UG" else layer.rest[-1:]) for op in multiply(span, of)]

    ops = [Op("resume", -1, batch) for batch in range(batches)]
    tile = 0
    while tile < len(streamed):
        if (run := runs.get(tile)) and order:
            for part, layer in order.over_layers(len(run)):
                ops += product(run[layer], part[0], order.batches(part))
            tile = run[-1].stop
            continue
        ops += multiply(span_at[tile], range(batches))
        tile = span_at[tile].stop
    return _with_last(ops)


def tiles_held(ops: Sequence[Op]) -> int:
    """The most tiles that a pass has in the ring at a time: each from its load to the last product with it."""
    held, most = set[int](), 0
    for op in ops:
        if op.kind == "load":
            held.add(op.tile)
            most = max(most, len(held))
        elif op.kind == "multiply" and op.last:
            held.discard(op.tile)
    return most


def _runs(overlaps: Sequence[AttentionOverlap]) -> list[list[AttentionOverlap]]:
    """Layers that follow each other without another matrix between them."""
    runs = [[overlap] for overlap in overlaps[:1]]
    for before, overlap in pairwise(overlaps):
        if before.stop == overlap.before.start:
            runs[-1].append(overlap)
        else:
            runs.append([overlap])
    return runs


def _with_last(ops: Sequence[Op]) -> list[Op]:
    """The operations, `last` where no later product needs their tiles."""
    found, needed = list[Op](), set[int]()
    for op in reversed(ops):
        found.append(replace(op, last=False) if op.kind == "multiply" and op.tile in needed else op)
        if op.kind == "multiply":
            needed.add(op.tile)
    return found[::-1]
