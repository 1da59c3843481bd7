"""Walks the operations of a pass in their order, as the executor does; what each takes, subclasses say."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, partial

from engines.offload.memory.layout import OUTSIDE, WeightTile, matrix_spans
from engines.offload.pass_ops import attention_overlaps, pass_ops, tiles_held
from harness.api import OffloadPolicy

#: Matrices of a layer before its attention: queries, keys and values.
_MATRICES_BEFORE_ATTENTION = 3


class PassWalk(ABC):
    """The passes of a model of `layers` layers, whose `tiles` come through a ring of `slots` where they are `streamed`.

    The tiles are those of layout.matrices_of.
    """

    def __init__(
        self, tiles: Sequence[WeightTile], streamed: Sequence[bool], layers: int, slots: int, policy: OffloadPolicy
    ) -> None:
        self._tiles = tiles
        self._streamed = streamed
        spans = matrix_spans(tiles)
        files = [tiles[span.start].file for span in spans]  # one for each layer
        per_layer = sum(not file.startswith(OUTSIDE) for file in files) // layers  # the head is a matrix too
        attends = [layer * per_layer + _MATRICES_BEFORE_ATTENTION for layer in range(layers)]
        #: By the last tile before it, the layer whose attention follows.
        self._attends = {spans[i - 1].stop - 1: layer for layer, i in enumerate(attends)}
        #: The last tile of each layer but the last.
        self._ends = {spans[layer * per_layer - 1].stop - 1 for layer in range(1, layers)}
        held = min(slots, sum(streamed))
        overlaps = attention_overlaps(spans, files, attends, streamed, held) if policy.overlaps_nano_batches else ()
        order = policy.nano_order
        if order and tiles_held(pass_ops(streamed, spans, order.nano_batches, overlaps, order)) >= max(1, held):
            order = None
        #: The operations of a pass by its number of batches.
        self._pass_ops = cache(partial(pass_ops, streamed, spans, overlaps=overlaps, order=order))

    def _walk(self, rows: Sequence[int], logits_rows: Sequence[int]) -> None:
        """Walks a pass. By batch: its rows, and those of them that need logits."""
        arrivals: dict[int, float] = {}
        ops = self._pass_ops(len(rows))
        attended = {op.tile for op in ops if op.kind == "attend"}
        for op in ops:
            if op.kind == "load":
                arrivals[op.tile] = self._load(self._tiles[op.tile])
            elif op.kind == "multiply":
                counts = logits_rows if self._tiles[op.tile].file.startswith(OUTSIDE) else rows
                count = sum(count for batch, count in enumerate(counts) if op.includes(batch))
                self._multiply(self._tiles[op.tile : op.tile + op.count], count, arrivals.get(op.tile), op.last)
            elif op.kind == "attend" or (op.tile in self._attends and op.tile not in attended):
                self._attend(self._attends[op.tile], op.batch, op.kind == "attend")
            elif op.tile in attended:
                self._await_attention(op.batch)
            elif op.tile in self._ends:
                self._leave_layer(op.batch)

    @abstractmethod
    def _load(self, tile: WeightTile) -> float:
        """When a tile is in its slot of the ring."""

    @abstractmethod
    def _multiply(self, tiles: Sequence[WeightTile], rows: int, arrival: float | None, is_last: bool) -> None:
        """Multiplies tiles with so many rows. One that was streamed came at `arrival`, and its slot is free after the
        last such product of the pass."""

    @abstractmethod
    def _attend(self, layer: int, batch: int, beside: bool) -> None:
        """A batch attends: before what follows in the pass, or `beside` it, and its attention is awaited later."""

    @abstractmethod
    def _await_attention(self, batch: int) -> None:
        """A batch whose attention may run beside products goes on."""

    @abstractmethod
    def _leave_layer(self, batch: int) -> None:
        """A batch goes on to the next layer."""
