"""One pass over the layers as a list of operations, which the executor runs and planning's simulator times.

`row` and `zigzag` run blocks of sequences in step, row one batch a pass and zigzag several; `sweep` runs one batch of
whatever is scheduled. Schedules differ only in who shares a pass (scheduler.py). Inside a pass the order is always the
same: each weight tile is loaded once and multiplied for all batches at once, and after the last tile of a matrix each
batch runs on to its next matrix. Source: FlexGen (Sheng et al. 2023), section 4.2 and algorithm 1, at the grain of a
tile instead of a layer.

Nano-batches (NanoFlow, Zhu et al. 2025, section 3) are parts of a sweep's batch that overlap attention: while one
attends, the products of another run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: `Op.batch` of an operation that is for all batches of the pass together.
ALL = -1


@dataclass(frozen=True)
class Op:
    """One operation of a pass.

    `load`: the stream delivers weight tile `tile` to a slot of the ring. `multiply`: the tile is multiplied with the
    rows of batch `batch`, or of all batches; so are the tiles behind it, `count` in all, where none of them is loaded.
    `resume`: the batch runs on to its next product, or to its attention where
    that overlaps: from the embedding (tile -1), after the last tile of a matrix, or after its attention. `attend`: the
    batch's attention runs beside what follows.
    """

    kind: Literal["load", "multiply", "resume", "attend"]
    tile: int
    batch: int = ALL
    count: int = 1


@dataclass(frozen=True)
class AttentionOverlap:
    """Tiles around an attention that each batch multiplies by itself: matrices `before` it, and the one `after` it."""

    before: range
    after: range


def attention_overlaps(
    spans: Sequence[range], groups: Sequence[str], attends: Sequence[int], streamed: Sequence[bool], slots: int
) -> list[AttentionOverlap]:
    """The attentions of a pass that can overlap products.

    `spans` are the tiles of each matrix, `groups` the layers that matrices belong to; `attends`: how many matrices come
    before each attention. A layer is left out whose `streamed` tiles would fill the ring's `slots`: they stay there
    until the last batch has multiplied them.
    """
    overlaps = []
    for end in attends:
        start = end
        while start > 0 and groups[start - 1] == groups[end - 1] and start - 1 not in attends:
            start -= 1
        if start == end or end == len(spans):
            continue
        overlap = AttentionOverlap(range(spans[start].start, spans[end - 1].stop), spans[end])
        held = max(sum(streamed[tile] for tile in tiles) for tiles in (overlap.before, overlap.after))
        if held < max(1, slots):
            overlaps.append(overlap)
    return overlaps


def pass_ops(
    streamed: Sequence[bool], spans: Sequence[range], batches: int, overlaps: Sequence[AttentionOverlap] = ()
) -> list[Op]:
    """The operations of one pass of `batches` batches, in order.

    `streamed`: for each weight tile, whether it comes through the ring; `spans`: the tiles of each matrix. A single
    batch has no products of others to overlap its attention with.
    """
    overlap_at = {overlap.before.start: overlap for overlap in overlaps if batches > 1}
    span_at = {span.start: span for span in spans}
    loaded: set[int] = set()

    def multiply(span: range, batch: int) -> list[Op]:
        """A matrix's tiles: those that are resident and follow each other in one operation."""
        ops, tile = list[Op](), span.start
        while tile < span.stop:
            stop = tile + 1
            if streamed[tile]:
                ops += [Op("load", tile)] if tile not in loaded else []
                loaded.add(tile)
            else:
                while stop < span.stop and not streamed[stop]:
                    stop += 1
            ops.append(Op("multiply", tile, batch, stop - tile))
            tile = stop
        return ops

    def by_itself(tiles: range, batch: int) -> list[Op]:
        """One batch multiplies some matrices, and runs on after each."""
        ops, tile = list[Op](), tiles.start
        while tile < tiles.stop:
            span = span_at[tile]
            ops += [*multiply(span, batch), Op("resume", span[-1], batch)]
            tile = span.stop
        return ops

    ops = [Op("resume", -1, batch) for batch in range(batches)]
    tile = 0
    while tile < len(streamed):
        if overlap := overlap_at.get(tile):
            before = overlap.before.stop - 1
            for batch in range(batches):
                ops += [*by_itself(overlap.before, batch), Op("attend", before, batch)]
            for batch in range(batches):
                ops += [Op("resume", before, batch), *by_itself(overlap.after, batch)]
            tile = overlap.after.stop
            continue
        span = span_at[tile]
        ops += multiply(span, ALL)
        ops += [Op("resume", span[-1], batch) for batch in range(batches)]
        tile = span.stop
    return ops
