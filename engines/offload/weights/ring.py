"""Where streamed weight tiles arrive: slots in RAM, filled from disk, or slots on a device, filled through RAM."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch

from engines.offload.device.protocol import Accelerator, Event
from engines.offload.memory.layout import WeightTile
from engines.offload.weights.files import WeightFiles
from harness.common.buffers import direct_buffer


class Ring(Protocol):
    """`slots` places for a tile each."""

    slots: int

    def fetch(self, tiles: Sequence[WeightTile], slots: Sequence[int]) -> None:
        """Fills slots with tiles that are neighbours in their file, and waits for that; of any thread."""
        ...

    def view(self, slot: int, nbytes: int) -> torch.Tensor:
        """The bytes uint8 [nbytes] of the tile in a slot."""
        ...

    def leave(self, slot: int) -> None:
        """All work with what is in a slot has been asked for: the next tile may take its place once that is done."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class HostRing:
    """Slots in RAM, which the disk fills; see Ring. `files` are closed with it."""

    def __init__(self, tiles: Sequence[WeightTile], slots: int, files: WeightFiles) -> None:
        self.slots = min(slots, len(tiles))
        self._slot_bytes = max((b.span for b in tiles), default=0)
        buffer = direct_buffer(max(1, self._slot_bytes * self.slots))
        self._memory = memoryview(buffer)
        self._tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        self._files = files

    def fetch(self, tiles: Sequence[WeightTile], slots: Sequence[int]) -> None:
        starts = [slot * self._slot_bytes for slot in slots]
        self._files.read(tiles, [self._memory[s : s + b.span] for s, b in zip(starts, tiles, strict=True)])

    def view(self, slot: int, nbytes: int) -> torch.Tensor:
        return self._tensor[slot * self._slot_bytes :][:nbytes]

    def leave(self, slot: int) -> None:
        """The work is done when it has been asked for."""

    def close(self) -> None:
        self._files.close()


class DeviceRing:
    """Slots on a device; see Ring. A tile comes from `held`, in pinned memory, or from disk by way of pinned memory.

    As many threads as there are `passing` buffers, pinned and of the largest tile's span, may fetch at once.
    """

    def __init__(
        self,
        tiles: Sequence[WeightTile],
        slots: int,
        held: Mapping[tuple[str, int], torch.Tensor],
        files: WeightFiles,
        device: Accelerator,
        passing: Sequence[torch.Tensor],
    ) -> None:
        self.slots = min(slots, len(tiles))
        self._held = held
        self._files = files
        self._device = device
        largest = max((b.span for b in tiles), default=0)
        self._tensor = torch.empty(self.slots, largest, dtype=torch.uint8, device=device.where)
        self._left: list[Sequence[Event]] = [()] * self.slots
        self._passing: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for buffer in passing:
            self._passing.put(buffer)

    def fetch(self, tiles: Sequence[WeightTile], slots: Sequence[int]) -> None:
        for tile, slot in zip(tiles, slots, strict=True):
            if (source := self._held.get((tile.file, tile.offset))) is not None:
                self._copy(source, tile, slot)
                continue
            staged = self._passing.get()
            try:
                self._files.read([tile], [memoryview(cast(Any, staged[: tile.span].numpy()))])
                self._copy(staged, tile, slot)
            finally:
                self._passing.put(staged)

    def _copy(self, source: torch.Tensor, tile: WeightTile, slot: int) -> None:
        pair = self._tensor[slot, : tile.nbytes], source[: tile.nbytes]
        event = self._device.copy([pair], self._left[slot])
        event.synchronize()  # of this copy alone: whoever computes meanwhile is not disturbed

    def view(self, slot: int, nbytes: int) -> torch.Tensor:
        return self._tensor[slot, :nbytes]

    def leave(self, slot: int) -> None:
        self._left[slot] = (self._device.mark(),)

    def close(self) -> None:
        self._files.close()
