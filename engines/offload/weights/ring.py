"""Where streamed weight blocks arrive: slots in RAM, filled from disk, or slots on a device, filled through RAM."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch

from engines.offload.device.protocol import Device, Event
from engines.offload.memory.layout import Block
from engines.offload.weights.files import BlockFiles
from harness.common.buffers import direct_buffer


class Ring(Protocol):
    """`slots` places for a block each."""

    slots: int

    def fetch(self, blocks: Sequence[Block], slots: Sequence[int]) -> None:
        """Fills slots with blocks that are neighbours in their file, and waits for that; of any thread."""
        ...

    def view(self, slot: int, nbytes: int) -> torch.Tensor:
        """The bytes uint8 [nbytes] of the block in a slot."""
        ...

    def leave(self, slot: int) -> None:
        """All work with what is in a slot has been asked for: the next block may take its place once that is done."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class HostRing:
    """Slots in RAM, which the disk fills; see Ring. `files` are closed with it."""

    def __init__(self, blocks: Sequence[Block], slots: int, files: BlockFiles) -> None:
        self.slots = min(slots, len(blocks))
        self._slot_bytes = max((b.span for b in blocks), default=0)
        buffer = direct_buffer(max(1, self._slot_bytes * self.slots))
        self._memory = memoryview(buffer)
        self._tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        self._files = files

    def fetch(self, blocks: Sequence[Block], slots: Sequence[int]) -> None:
        starts = [slot * self._slot_bytes for slot in slots]
        self._files.read(blocks, [self._memory[s : s + b.span] for s, b in zip(starts, blocks, strict=True)])

    def view(self, slot: int, nbytes: int) -> torch.Tensor:
        return self._tensor[slot * self._slot_bytes :][:nbytes]

    def leave(self, slot: int) -> None:
        """The work is done when it has been asked for."""

    def close(self) -> None:
        self._files.close()


class DeviceRing:
    """Slots on a device; see Ring. A block comes from `held`, in pinned memory, or from disk by way of pinned memory.

    As many threads as there are `passing` buffers, pinned and of the largest block's span, may fetch at once.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        slots: int,
        held: Mapping[tuple[str, int], torch.Tensor],
        files: BlockFiles,
        device: Device,
        passing: Sequence[torch.Tensor],
    ) -> None:
        self.slots = min(slots, len(blocks))
        self._held = held
        self._files = files
        self._device = device
        largest = max((b.span for b in blocks), default=0)
        self._tensor = torch.empty(self.slots, largest, dtype=torch.uint8, device=device.where)
        self._left: list[Sequence[Event]] = [()] * self.slots
        self._passing: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for buffer in passing:
            self._passing.put(buffer)

    def fetch(self, blocks: Sequence[Block], slots: Sequence[int]) -> None:
        for block, slot in zip(blocks, slots, strict=True):
            if (source := self._held.get((block.file, block.offset))) is not None:
                self._copy(source, block, slot)
                continue
            staged = self._passing.get()
            try:
                self._files.read([block], [memoryview(cast(Any, staged[: block.span].numpy()))])
                self._copy(staged, block, slot)
            finally:
                self._passing.put(staged)

    def _copy(self, source: torch.Tensor, block: Block, slot: int) -> None:
        pair = self._tensor[slot, : block.nbytes], source[: block.nbytes]
        event = self._device.copy([pair], self._left[slot])
        event.synchronize()  # of this copy alone: whoever computes meanwhile is not disturbed

    def view(self, slot: int, nbytes: int) -> torch.Tensor:
        return self._tensor[slot, :nbytes]

    def leave(self, slot: int) -> None:
        self._left[slot] = (self._device.mark(),)

    def close(self) -> None:
        self._files.close()
