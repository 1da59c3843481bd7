"""Runs the operations of a pass for real: batches as greenlets that stop wherever they need a weight block."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from engines.offload.gemm import Arithmetic, new_product
from engines.offload.kernels import Product
from engines.offload.layout import Block
from engines.offload.model import PackedBatch, SeamedModel
from engines.offload.schedule import Op, pass_ops
from engines.offload.timeline import Timeline
from engines.offload.transfer import BlockStream
from harness.api import HarnessError


@dataclass(frozen=True)
class _Need:
    """What a batch has stopped for: the product of x [rows, columns] with a matrix, plus a bias."""

    matrix: str
    x: torch.Tensor
    bias: torch.Tensor | None


class Executor:
    """Runs passes of a model whose weight blocks are `resident` (stored bytes by index) or come from `stream`.

    Every batch is a greenlet in `model(batch)`. It stops in `product`. When all have stopped, the rows of those that
    need the matrix whose turn it is are multiplied together, block by block as they come, and each is resumed with
    its part: a weight is read, and widened or cast, once for all batches.
    """

    def __init__(
        self,
        model: SeamedModel,
        blocks: Sequence[Block],
        stored: torch.dtype,
        resident: dict[int, torch.Tensor],
        stream: BlockStream,
        arithmetic: Arithmetic,
        timeline: Timeline,
    ) -> None:
        self._model = model
        self._blocks = blocks
        self._stored = stored
        self._resident = resident
        self._stream = stream
        self._product = arithmetic.product
        self._timeline = timeline
        self._streamed = [i not in resident for i in range(len(blocks))]
        self._last = [a.matrix != b.matrix for a, b in pairwise(blocks)] + [True]
        self._outputs = {matrix.name: matrix.rows for matrix in model.matrices}
        #: By matrix of an expert, the mixture it belongs to, and what each mixture has on disk: places in the stream.
        self._mixture = {m.name: _module(m.parameter) for m in model.matrices if m.expert is not None}
        self._places: dict[str, list[tuple[int, str]]] = {}
        for place, block in enumerate(b for i, b in enumerate(blocks) if i not in resident):
            if block.matrix in self._mixture:
                self._places.setdefault(self._mixture[block.matrix], []).append((place, block.matrix))
        self._ops: dict[int, list[Op]] = {}  # of a pass, by its number of batches
        self._needed: set[str] = set()  # experts' matrices that some batch of this pass asks for
        self._decided: set[str] = set()  # mixtures whose experts are chosen in this pass
        largest = max(b.shape[0] * b.shape[1] for b in blocks)
        multiplied: torch.dtype = getattr(torch, arithmetic.weights)
        self._cast = None if stored == multiplied else torch.empty(largest, dtype=multiplied)
        model.weights = self

    def run(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Logits of each batch. Inference mode is the caller's to enter: inside greenlets it would leak."""
        self._stream.align()
        self._needed.clear()
        self._decided.clear()
        running = [greenlet(self._model) for _ in batches]
        given: list[Any] = list(batches)  # what each is resumed with
        needs: list[Any] = [None] * len(batches)  # what each has stopped for: a _Need, and at the end logits
        raw = torch.empty(0)
        joint: _Joint | None = None
        if len(batches) not in self._ops:
            self._ops[len(batches)] = pass_ops(self._streamed, self._last, len(batches), self._stream.slots)
        for op in self._ops[len(batches)]:
            began = time.perf_counter()
            block = self._blocks[op.block]
            if op.kind == "load":
                if self._is_needed(block):
                    raw = self._stream.next(block)
                else:
                    self._stream.skip()
            elif op.kind == "multiply":
                if not self._is_needed(block):
                    continue
                if joint is None:
                    joint = self._joint(block.matrix, needs)
                    given = joint.parts
                joint.add(self._product, block, self._weight(op.block, raw))
                if self._streamed[op.block]:
                    self._stream.release()
                self._timeline.add("compute", block.matrix, began, time.perf_counter())
            elif given[op.batch] is not None:
                needs[op.batch] = running[op.batch].switch(given[op.batch])
                given[op.batch] = None
                joint = None
                self._timeline.add("compute", "between products", began, time.perf_counter())
        return [torch.as_tensor(logits) for logits in needs]

    def product(self, matrix: str, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x times the transpose of a matrix, plus `bias`; called inside a batch's greenlet, which stops for it."""
        return torch.as_tensor(getcurrent().parent.switch(_Need(matrix, x, bias)))

    def visit(self, stacks: Sequence[str], hit: Sequence[int], count: int) -> Sequence[int]:
        """Notes which experts a batch will ask for; called inside its greenlet, before it asks for the first."""
        self._needed.update(f"{stack}[{e}]" for stack in stacks for e in hit)
        return hit

    def _joint(self, matrix: str, needs: Sequence[_Need]) -> _Joint:
        """The product of `matrix` for all batches that have stopped for it, which are all unless it is an expert's."""
        asking = [need if need.matrix == matrix else None for need in needs]
        if None in asking and matrix not in self._mixture:
            other = next(need.matrix for need in needs if need.matrix != matrix)
            raise HarnessError(f"the model asks for {other}, its dry pass had {matrix} here")
        return _Joint(asking, self._outputs[matrix])

    def _is_needed(self, block: Block) -> bool:
        """Whether some batch will ask for a block; all have said so when the first of its mixture is due."""
        mixture = self._mixture.get(block.matrix)
        if mixture is None:
            return True
        if mixture not in self._decided:
            self._decided.add(mixture)
            self._stream.leave_out([p for p, name in self._places.get(mixture, ()) if name not in self._needed])
        return block.matrix in self._needed

    def _weight(self, index: int, raw: torch.Tensor) -> torch.Tensor:
        """A block in the dtype that is multiplied."""
        block = self._blocks[index]
        weight = self._resident.get(index, raw).view(self._stored).view(block.shape)
        return weight if self._cast is None else self._cast[: weight.numel()].view(block.shape).copy_(weight)


class _Joint:
    """A matrix's product for several batches at once; `parts` is each one's, or None for who does not need it."""

    def __init__(self, needs: Sequence[_Need | None], outputs: int) -> None:
        asking = [need for need in needs if need is not None]
        self._bias = asking[0].bias
        rows = sum(len(need.x) for need in asking)
        self._x = asking[0].x
        if len(asking) > 1:
            self._x = new_product(rows, self._x.shape[1], self._x)
            torch.cat([need.x for need in asking], out=self._x)
        self._out = new_product(rows, outputs, self._x)
        self._sum: torch.Tensor | None = None
        self.parts: list[torch.Tensor | None] = []
        start = 0
        for need in needs:
            self.parts.append(None if need is None else self._out[start : start + len(need.x)])
            start += 0 if need is None else len(need.x)

    def add(self, product: Product, block: Block, weight: torch.Tensor) -> None:
        """Adds what one block contributes."""
        if not len(self._x):  # nobody's logits are wanted; the block must pass by all the same
            return
        part = slice(block.start, block.stop)
        if block.axis == 0:
            product(self._x, weight, None if self._bias is None else self._bias[part], self._out[:, part])
        elif self._x.dtype == torch.float32:
            product(self._x[:, part], weight, self._out if block.start else self._bias, self._out)
        else:
            self._add_in_float32(product, self._x[:, part], weight, block.stop == self._x.shape[1])

    def _add_in_float32(self, product: Product, x: torch.Tensor, weight: torch.Tensor, last: bool) -> None:
        """Adds a block of columns to a sum that is rounded once, as a whole product's would be."""
        product(x, weight, None, self._out)
        self._sum = self._out.float() if self._sum is None else self._sum.add_(self._out)
        if last:
            self._out.copy_(self._sum if self._bias is None else self._sum.add_(self._bias))


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
