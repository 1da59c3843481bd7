"""Runs the operations of a pass for real: batches as greenlets that stop wherever they need a weight block."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from greenlet import getcurrent, greenlet

from engines.offload.gemm import Arithmetic, new_product
from engines.offload.layout import Block
from engines.offload.model import PackedBatch, SeamedModel
from engines.offload.schedule import Op, pass_ops
from engines.offload.timeline import Timeline
from engines.offload.transfer import BlockStream
from harness.api import HarnessError


class Executor:
    """Runs passes of a model whose weight blocks are `resident` (stored bytes by index) or come from `stream`.

    Every batch is a greenlet in `model(batch)`. It stops in `product`, asks for a block and is resumed with it
    when the schedule says so. Where the arithmetic wants another dtype than the stored one, a block is cast once
    for all batches. Its slot is free again right after the cast, or after the last batch where there is none.
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
        self._of: dict[str, list[int]] = {}
        for i, block in enumerate(blocks):
            self._of.setdefault(block.matrix, []).append(i)
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
        last = len(batches) - 1
        running = [greenlet(self._model) for _ in batches]
        wanted: list[object] = [None] * len(batches)
        raw = weight = torch.empty(0)
        if len(batches) not in self._ops:
            self._ops[len(batches)] = pass_ops(self._streamed, len(batches), self._stream.slots, self._cast is not None)
        for op in self._ops[len(batches)]:
            began = time.perf_counter()
            if op.kind == "start":
                wanted[op.batch] = running[op.batch].switch(batches[op.batch])
                self._timeline.add("compute", "embedding", began, time.perf_counter())
                continue
            block = self._blocks[op.block]
            needed = self._is_needed(block)
            if op.kind == "load":
                if needed:
                    raw = self._stream.next(block)
                else:
                    self._stream.skip()
                continue
            if op.batch == 0 and needed:
                weight = self._weight(op.block, raw)
            if wanted[op.batch] == op.block:
                wanted[op.batch] = running[op.batch].switch(weight)
                self._timeline.add("compute", block.matrix, began, time.perf_counter())
            elif block.matrix not in self._mixture:
                raise HarnessError(f"the model asks for block {wanted[op.batch]}, its dry pass had {op.block} here")
            if self._cast is None and needed and self._streamed[op.block] and op.batch == last:
                self._stream.release()
        return [torch.as_tensor(logits) for logits in wanted]

    def product(self, matrix: str, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x times the transpose of a matrix, plus `bias`, block by block; called inside a batch's greenlet."""
        out = new_product(x, self._outputs[matrix])
        for i in self._of[matrix]:
            weight = getcurrent().parent.switch(i)
            block = self._blocks[i]
            if not len(x):  # nobody's logits are wanted; the block must pass by all the same
                continue
            part = slice(block.start, block.stop)
            if block.axis == 0:
                self._product(x, weight, None if bias is None else bias[part], out[:, part])
            else:
                self._product(x[:, part], weight, out if block.start else bias, out)
        return out

    def visit(self, stacks: Sequence[str], hit: Sequence[int], count: int) -> Sequence[int]:
        """Notes which experts a batch will ask for; called inside its greenlet, before it asks for the first."""
        self._needed.update(f"{stack}[{e}]" for stack in stacks for e in hit)
        return hit

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
        if self._cast is None:
            return weight
        cast = self._cast[: weight.numel()].view(block.shape)
        cast.copy_(weight)
        if self._streamed[index]:
            self._stream.release()
        return cast


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
