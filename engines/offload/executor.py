"""Runs the operations of a pass for real: batches as greenlets that stop wherever they need a weight tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from engines.offload.device.protocol import Device
from engines.offload.kernels import Gemm, stored_view
from engines.offload.memory.layout import WeightTile
from engines.offload.memory.padding import padded_rows
from engines.offload.memory.storage import Storage
from engines.offload.model.meta_model import MetaModel, PackedBatch
from engines.offload.pass_ops import AttentionOverlap, Op, attention_overlaps, pass_ops
from engines.offload.timeline import AWAITING, BETWEEN, Timeline
from engines.offload.weights.gemm import padded_output
from engines.offload.weights.stream import WeightStream
from harness.api import HarnessError

_PAUSED = object()
#: Asks for a batch's attention, and gives what waits for it.
Begin = Callable[[], Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class _Attending:
    """What a batch has stopped for while its attention runs in a thread of its own."""

    result: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class _Need:
    """What a batch has stopped for: the product of x [rows, columns] with a matrix, plus a bias."""

    matrix: str
    x: torch.Tensor
    bias: torch.Tensor | None


class Executor:
    """Runs passes of a model whose weight tiles are `resident` (stored bytes by index) or come from `stream`.

    `products` are by how weights are stored.

    Every batch is a greenlet in `model(batch)`. It stops in `product`. When all have stopped, the rows of those that
    need the matrix whose turn it is are multiplied together, tile by tile as they come, and each is resumed with
    its part: a weight is read, and widened or cast, once for all batches.

    With `overlaps` batches of one pass take turns around attention, where they stop in `aside`: it runs in a thread of
    its own, or in a stream of its own of the `device` that computes. `at_home`: the host attends beside that device.
    """

    def __init__(
        self,
        model: MetaModel,
        tiles: Sequence[WeightTile],
        resident: dict[int, torch.Tensor],
        stream: WeightStream,
        products: Mapping[Storage, Gemm],
        timeline: Timeline,
        overlaps: bool = False,
        device: Device | None = None,
        at_home: bool = False,
    ) -> None:
        self._model = model
        self._tiles = tiles
        self._resident = resident
        self._stream = stream
        self._products = products
        self._timeline = timeline
        self._streamed = [i not in resident for i in range(len(tiles))]
        self._last = [a.matrix != b.matrix for a, b in pairwise(tiles)] + [True]
        self._outputs = {matrix.name: matrix.rows for matrix in model.matrices}
        #: By matrix of an expert, the mixture it belongs to, and what each mixture has on disk: (tile, matrix).
        self._mixture = {m.name: _module(m.parameter) for m in model.matrices if m.expert is not None}
        self._places: dict[str, list[tuple[int, str]]] = {}
        for tile in tiles:
            if tile.matrix in self._mixture and tile.index not in resident:
                self._places.setdefault(self._mixture[tile.matrix], []).append((tile.index, tile.matrix))
        self._ops: dict[int, list[Op]] = {}  # of a pass, by its number of batches
        self._needed: set[str] = set()  # experts' matrices that some batch of this pass asks for
        self._decided: set[str] = set()  # mixtures whose experts are chosen in this pass
        self._overlaps: list[AttentionOverlap] = []
        if overlaps:
            firsts = [0, *(i + 1 for i, ends in enumerate(self._last) if ends)]
            spans = [range(a, b) for a, b in pairwise(firsts)]
            self._overlaps = attention_overlaps(
                spans, [m.group for m in model.matrices], model.attends, self._streamed, stream.slots
            )
        self._device = device
        threaded = self._overlaps and device is None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="attention") if threaded else None
        self._overlapping = self._several = False  # the batches of this pass
        self._at_home = at_home
        model.weights = self

    @property
    def overlaps_attention(self) -> bool:
        """Whether there is a layer whose attention some batches can do while others multiply."""
        return bool(self._overlaps)

    def close(self) -> None:
        """Ends the thread for attention. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown()

    def run(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Logits of each batch. Inference mode is the caller's to enter: inside greenlets it would leak."""
        self._stream.align()
        self._needed.clear()
        self._decided.clear()
        running = [greenlet(self._model) for _ in batches]
        given: list[Any] = list(batches)  # what each is resumed with
        needs: list[Any] = [None] * len(batches)  # what each has stopped for: a _Need, and at the end logits
        self._several = len(batches) > 1
        self._overlapping = self.overlaps_attention and self._several
        try:
            self._run(self._ops_for(len(batches)), running, given, needs)
        except BaseException:
            for need in (n for n in needs if isinstance(n, _Attending)):  # its pages may have other owners next
                with suppress(Exception):
                    need.result()
            raise
        return [torch.as_tensor(logits) for logits in needs]

    def _run(self, ops: Sequence[Op], running: Sequence[greenlet], given: list[Any], needs: list[Any]) -> None:
        """The operations of a pass."""
        raw: dict[int, torch.Tensor] = {}  # by tile, what is in the ring
        joint: _Joint | None = None
        for op, following in zip(ops, [*ops[1:], None], strict=True):
            tile = self._tiles[op.tile]
            if op.kind == "load":
                if self._is_needed(tile):
                    raw[op.tile] = self._stream.next(op.tile)
                else:
                    self._stream.skip()
            elif op.kind == "multiply":
                if not self._is_needed(tile):
                    continue
                began = self._timeline.now()
                if joint is None:
                    joint = self._joint(tile.matrix, needs, op.batch)
                    given = [old if part is None else part for old, part in zip(given, joint.parts, strict=True)]
                joint.add(self._products[tile.stored], tile, self._weight(op.tile, raw))
                if op.tile in raw and op.batch in (-1, len(running) - 1):
                    del raw[op.tile]
                    self._stream.release()
                self._timeline.add("compute", tile.matrix, began, self._timeline.now())
            elif op.kind == "run":
                joint = None
                attends = following is not None and following.kind == "attend"
                self._run_on(op.batch, attends, running, given, needs)
                if following is None or following.kind != "run":
                    self._go_on(running, needs)

    def _run_on(self, k: int, attends: bool, running: Sequence[greenlet], given: list[Any], needs: list[Any]) -> None:
        """Batch k goes on, if it has been given something, to its next need; `attends`: or to its attention."""
        began = self._timeline.now()
        if isinstance(needs[k], _Attending):
            given[k] = needs[k].result()
            self._timeline.add("compute", AWAITING, began, self._timeline.now())
            began = self._timeline.now()
        if given[k] is None:
            return
        needs[k] = running[k].switch(given[k])
        if isinstance(needs[k], _Attending) and not attends:
            needs[k] = running[k].switch(needs[k].result())
        given[k] = None
        self._timeline.add("compute", BETWEEN, began, self._timeline.now())

    def _go_on(self, running: Sequence[greenlet], needs: list[Any]) -> None:
        """Those that have paused go on, as all others have come as far."""
        for k in (k for k, need in enumerate(needs) if need is _PAUSED):
            began = self._timeline.now()
            needs[k] = running[k].switch()
            self._timeline.add("compute", BETWEEN, began, self._timeline.now())

    def product(self, matrix: str, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x times the transpose of a matrix, plus `bias`; called inside a batch's greenlet, which stops for it."""
        return torch.as_tensor(getcurrent().parent.switch(_Need(matrix, x, bias)))

    def aside(self, begin: Begin) -> torch.Tensor:
        """A batch's attention, beside what others compute; called inside its greenlet, which stops for it. `begin` asks
        for it, and what that gives ends it."""
        if not self._overlapping:
            finish = begin()
            if self._at_home and self._several:  # all batches ask before the first one waits
                self.pause()
            return finish()
        result = self._in_its_thread(begin) if self._device is None else self._in_its_stream(begin)
        return torch.as_tensor(getcurrent().parent.switch(_Attending(result)))

    def _in_its_thread(self, begin: Begin) -> Callable[[], torch.Tensor]:
        assert self._thread is not None
        begun = self._thread.submit(_inferred, begin)

        def result() -> torch.Tensor:
            return begun.result()()

        return result

    def _in_its_stream(self, begin: Begin) -> Callable[[], torch.Tensor]:
        """Asks the device for it; what is returned makes who needs it wait for it there."""
        device = self._device
        assert device is not None
        with device.beside():
            finish, ended = begin(), device.mark()

        def result() -> torch.Tensor:
            device.join(ended)
            return finish()

        return result

    def pause(self) -> None:
        """Lets the other batches come as far; called inside a batch's greenlet, which stops for it."""
        getcurrent().parent.switch(_PAUSED)

    def visit(self, stacks: Sequence[str], hit: Sequence[int], count: int) -> Sequence[int]:
        """Notes which experts a batch will ask for; called inside its greenlet, before it asks for the first."""
        self._needed.update(f"{stack}[{e}]" for stack in stacks for e in hit)
        return hit

    def _ops_for(self, batches: int) -> list[Op]:
        if batches not in self._ops:
            overlaps = self._overlaps if batches > 1 else ()
            self._ops[batches] = pass_ops(self._streamed, self._last, batches, self._stream.slots, overlaps)
        return self._ops[batches]

    def _joint(self, matrix: str, needs: Sequence[Any], batch: int) -> _Joint:
        """The product of `matrix` for a batch, or for all that have stopped for it: all, unless it is an expert's."""
        for k, need in enumerate(needs):
            if batch in (-1, k) and need.matrix != matrix and matrix not in self._mixture:
                raise HarnessError(f"the model asks for {need.matrix}, its dry pass had {matrix} here")
        asking = [need if batch in (-1, k) and need.matrix == matrix else None for k, need in enumerate(needs)]
        return _Joint(asking, self._outputs[matrix])

    def _is_needed(self, tile: WeightTile) -> bool:
        """Whether some batch will ask for a tile; all have said so when the first of its mixture is due."""
        mixture = self._mixture.get(tile.matrix)
        if mixture is None:
            return True
        if mixture not in self._decided:
            self._decided.add(mixture)
            self._stream.leave_out([p for p, name in self._places.get(mixture, ()) if name not in self._needed])
        return tile.matrix in self._needed

    def _weight(self, index: int, raw: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """A tile as it is stored."""
        tile = self._tiles[index]
        return stored_view(raw[index] if index in raw else self._resident[index], tile.stored, *tile.shape)


class _Joint:
    """A matrix's product for several batches at once; `parts` is each one's, or None for who does not need it."""

    def __init__(self, needs: Sequence[_Need | None], outputs: int) -> None:
        asking = [need for need in needs if need is not None]
        self._bias = asking[0].bias
        rows = sum(len(need.x) for need in asking)
        self._x = asking[0].x
        multiplied = padded_rows(rows, self._x.element_size())
        if len(asking) > 1 or multiplied > rows:
            self._x = padded_output(multiplied, self._x.shape[1], self._x)
            torch.cat([need.x for need in asking], out=self._x[:rows])
            self._x[rows:] = 0
        self._out = padded_output(multiplied, outputs, self._x)
        self._sum: torch.Tensor | None = None
        self.parts: list[torch.Tensor | None] = []
        start = 0
        for need in needs:
            self.parts.append(None if need is None else self._out[start : start + len(need.x)])
            start += 0 if need is None else len(need.x)

    def add(self, product: Gemm, tile: WeightTile, weight: torch.Tensor) -> None:
        """Adds what one tile contributes."""
        if not len(self._x):  # nobody's logits are wanted; the tile must pass by all the same
            return
        part = slice(tile.start, tile.stop)
        if tile.axis == 0:
            product(self._x, weight, None if self._bias is None else self._bias[part], self._out[:, part])
        elif self._x.dtype == torch.float32:
            product(self._x[:, part], weight, self._out if tile.start else self._bias, self._out)
        else:
            self._add_in_float32(product, self._x[:, part], weight, tile.stop == self._x.shape[1])

    def _add_in_float32(self, product: Gemm, x: torch.Tensor, weight: torch.Tensor, last: bool) -> None:
        """Adds a tile of columns to a sum that is rounded once, as a whole product's would be."""
        product(x, weight, None, self._out)
        self._sum = self._out.float() if self._sum is None else self._sum.add_(self._out)
        if last:
            self._out.copy_(self._sum if self._bias is None else self._sum.add_(self._bias))


@torch.inference_mode()
def _inferred(begin: Begin) -> Callable[[], torch.Tensor]:
    """Threads do not inherit the mode."""
    return begin()


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
