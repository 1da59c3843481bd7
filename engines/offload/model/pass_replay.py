"""Replays passes of as many rows as one that was captured: in its memory, without the model's Python code.

A pass of one row asks for hundreds of operations that compute little, and asking takes longer than computing them. It
is what CUDA graphs are to a device: the operations of a pass are the same whatever its tokens are, as the model's code
depends on how many there are, never on their values.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from engines.offload.kernels import AttentionSpec
from engines.offload.kernels.launch import capture
from engines.offload.model.hooks import Attention
from engines.offload.model.layer_products import PackedBatch
from engines.offload.model.pass_capture import Buffer, PassCapture, Step
from harness.api import first_line

#: A pass of more rows computes for so long that asking costs little.
_MOST_ROWS = 64
#: How many passes of one size follow each other before one is captured, which takes as long as several: the next one
#: will likely have that size too.
_BEFORE_CAPTURE = 2
#: Memory of captured passes. Each has all of it to itself while it runs.
_ARENA_BYTES = 16 << 20
#: Steps of all captured passes together: each takes about a kilobyte.
_MOST_STEPS = 10_000
#: Where in the arena a tensor may begin.
_ALIGNED = 64


class Arena:
    """Memory that stays where it is and takes none from the system but for what was written since it was `released`."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def release(self) -> None:
        """Gives it back; what was written is gone."""
        self._memory.madvise(mmap.MADV_DONTNEED)


class PassReplay:
    """Runs the passes of a `model` on the host, those that have a single batch: as the model does, until so many of one
    size have followed each other that one is captured; later ones of that size are replayed."""

    def __init__(self, model: Callable[[PackedBatch], torch.Tensor]) -> None:
        self._model = model
        self._arena = Arena(_ARENA_BYTES)
        self._last = 0, 0  # the size of the last pass: rows, and rows of logits
        self._alike = 0  # how many passes of that size followed each other
        self._most_rows = _MOST_ROWS
        self._captured: dict[tuple[int, int], CapturedPass] = {}  # by size; the one that was used last at the end
        self.problem = ""  # why nothing is captured any more, or empty

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        """The model's logits [rows of logits_indices, vocabulary]."""
        size = len(batch.ids), len(batch.logits_indices)
        self._last, self._alike = size, self._alike + 1 if size == self._last else 1
        if (captured := self._captured.pop(size, None)) is not None:
            self._captured[size] = captured
            return captured.run(batch)
        self._arena.release()  # this pass may need as much
        if self.problem or size[0] > self._most_rows or self._alike <= _BEFORE_CAPTURE:
            return self._model(batch)
        return self._capture(batch, size)

    def model_for(self, batches: int) -> Callable[[PackedBatch], torch.Tensor]:
        """What runs each of so many batches of a pass."""
        if batches == 1:
            return self
        self._arena.release()
        return self._model

    def _capture(self, batch: PackedBatch, size: tuple[int, int]) -> torch.Tensor:
        own = Inputs(batch)
        taken = PassCapture()
        token = capture.set(taken)
        try:
            with taken:
                logits = self._model(own.batch(taken))
        finally:
            capture.reset(token)
        self.problem = taken.problem
        if not self.problem:
            self._keep(taken, taken.where(logits), own, size)
        return logits

    def _keep(self, taken: PassCapture, result: Buffer | torch.Tensor, own: Inputs, size: tuple[int, int]) -> None:
        """Keeps what was captured, in place of what was not used for longest, if it fits."""
        if not isinstance(result, Buffer) or len(taken.steps) > _MOST_STEPS:
            self.problem = f"a pass of {len(taken.steps)} steps cannot be kept"
            return
        places, needed = _places(taken.steps, taken.storages, result.storage)
        if needed > _ARENA_BYTES:
            self._most_rows = size[0] - 1
            return
        try:
            self._captured[size] = CapturedPass(taken.steps, places, result, own, self._arena)
        except (RuntimeError, AssertionError) as exc:  # what the module's code copies first, such as a transposed input
            self.problem = f"a step cannot be repeated where it lies: {first_line(exc)}"
            return
        while sum(map(len, self._captured.values())) > _MOST_STEPS:
            del self._captured[next(iter(self._captured))]


class Inputs:
    """What a captured pass computes with that differs from pass to pass, in tensors of its own."""

    def __init__(self, batch: PackedBatch) -> None:
        self._tensors = [tensor.clone() for tensor in _tensors(batch)]
        self._given = batch

    def set(self, batch: PackedBatch) -> None:
        """Takes the values of another pass of as many rows."""
        for own, given in zip(self._tensors, _tensors(batch), strict=True):
            own.copy_(given)
        self._given = batch

    def batch(self, taken: PassCapture) -> PackedBatch:
        """The pass that is captured."""
        ids, positions, logits_indices = self._tensors
        attention = _CapturedAttention(taken, self)
        return replace(self._given, ids=ids, positions=positions, logits_indices=logits_indices, attention=attention)

    @property
    def attention(self) -> Attention:
        """Of the pass that runs."""
        return self._given.attention


def _tensors(batch: PackedBatch) -> Sequence[torch.Tensor]:
    return batch.ids, batch.positions, batch.logits_indices


class _CapturedAttention:
    """The attention of a pass that is captured: a step that asks for that of the pass that runs then."""

    def __init__(self, taken: PassCapture, inputs: Inputs) -> None:
        self._taken, self._inputs = taken, inputs

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        with self._taken.paused():
            output = self._inputs.attention.attend(layer, query, key, value, spec)
        self._taken.launched(partial(self._bind, layer, spec), query, key, value, output, created=1)
        return output

    def _bind(
        self, layer: int, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        output: torch.Tensor,
    ) -> Callable[[], None]:  # fmt: skip
        inputs = self._inputs

        def attend() -> None:
            output.copy_(inputs.attention.attend(layer, query, key, value, spec))

        return attend


class CapturedPass:
    """The steps of a pass, bound to their tensors in an arena, where storage i begins at byte `places[i]`."""

    def __init__(
        self, steps: Sequence[Step], places: Sequence[int], result: Buffer, inputs: Inputs, arena: Arena
    ) -> None:
        def tensor(at: Buffer | torch.Tensor) -> torch.Tensor:
            if not isinstance(at, Buffer):
                return at
            values = arena.bytes.view(at.dtype)
            return values.as_strided(at.size, at.stride, places[at.storage] // at.dtype.itemsize + at.offset)

        self._calls = [step.bind(*map(tensor, step.tensors)) for step in steps]
        self._inputs = inputs
        self._result = tensor(result)

    def __len__(self) -> int:
        return len(self._calls)

    def run(self, batch: PackedBatch) -> torch.Tensor:
        """The logits of another pass of as many rows."""
        self._inputs.set(batch)
        for call in self._calls:
            call()
        return self._result.clone()


def _places(steps: Sequence[Step], storages: Sequence[int], result: int) -> tuple[list[int], int]:
    """At which byte each storage begins, where those of storages that are in use in the same step do not meet, and how
    many bytes that takes; storage `result` is in use to the end."""
    first, last = dict[int, int](), dict[int, int]()
    for i, step in enumerate(steps):
        for at in step.tensors:
            if isinstance(at, Buffer):
                first.setdefault(at.storage, i)
                last[at.storage] = i
    last[result] = len(steps)
    places, needed = [0] * len(storages), 0
    in_use: list[tuple[int, int, int]] = []  # first byte, byte behind, last step
    for storage in sorted(first, key=first.__getitem__):
        in_use = [each for each in in_use if each[2] >= first[storage]]
        begin = 0
        for start, stop, _ in in_use:
            if begin + storages[storage] <= start:
                break
            begin = max(begin, stop)
        places[storage] = begin
        end = begin + -(-storages[storage] // _ALIGNED) * _ALIGNED
        needed = max(needed, end)
        in_use = sorted([*in_use, (begin, end, last[storage])])
    return places, needed
