"""Where streamed weight tiles arrive: slots in host memory, filled from disk, or on a device, filled by way of it."""

import queue
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch

from engines.offload.device.protocol import Accelerator, Event
from engines.offload.memory.layout import WeightTile
from engines.offload.weights.tile_reader import TileReader, page_aligned


class Ring(Protocol):
    """`slots` buffers, each for one tile."""

    slots: int

    def fetch(self, tiles: Sequence[WeightTile], slots: Sequence[int]) -> None:
        """Fills slots with tiles that follow each other in their file, and returns when they are there; for any thread.

        Raises HarnessError or OSError, as TileReader.read.
        """

    def view(self, slot: int, nbytes: int) -> torch.Tensor:
        """The bytes uint8 [nbytes] of the tile in a slot."""

    def free(self, slot: int) -> None:
        """All work on a slot's tile has been issued: the slot may be overwritten when that work is done."""


class HostRing:
    """Slots in host memory, filled by `reader`; see Ring."""

    def __init__(self, tiles: Sequence[WeightTile], slots: int, reader: TileReader) -> None:
        self.slots = min(slots, len(tiles))
        self._slot_bytes = max((tile.span for tile in tiles), default=0)
        self._tensor = page_aligned(max(1, self._slot_bytes * self.slots))
        self._memory = memoryview(cast(Any, self._tensor.numpy()))
        self._reader = reader

    def fetch(self, tiles: Sequence[WeightTile], slots: Sequence[int]) -> None:
        starts = [slot * self._slot_bytes for slot in slots]
        self._reader.read(tiles, [self._memory[a : a + tile.span] for a, tile in zip(starts, tiles, strict=True)])

    def view(self, slot: int, nbytes: int) -> torch.Tensor:
        return self._tensor[slot * self._slot_bytes :][:nbytes]

    def free(self, slot: int) -> None:
        """On the host, work is done when it has been issued."""


class DeviceRing:
    """Slots on a device; see Ring. A tile comes from `pinned` host memory (by index), or from disk through a staging
    buffer.

    As many threads may fetch at once as there are `staging` buffers, pinned and of the largest tile's span.
    """

    def __init__(
        self,
        tiles: Sequence[WeightTile],
        slots: int,
        pinned: Mapping[int, torch.Tensor],
        reader: TileReader,
        device: Accelerator,
        staging: Sequence[torch.Tensor],
    ) -> None:
        self.slots = min(slots, len(tiles))
        self._pinned = pinned
        self._reader = reader
        self._device = device
        largest = max((tile.span for tile in tiles), default=0)
        self._tensor = torch.empty(self.slots, largest, dtype=torch.uint8, device=device.where)
        self._freed: list[Sequence[Event]] = [()] * self.slots  # by slot, when it may be overwritten
        self._staging: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for buffer in staging:
            self._staging.put(buffer)

    def fetch(self, tiles: Sequence[WeightTile], slots: Sequence[int]) -> None:
        for tile, slot in zip(tiles, slots, strict=True):
            if (pinned := self._pinned.get(tile.index)) is not None:
                self._copy(pinned, tile, slot)
                continue
            staged = self._staging.get()
            try:
                self._reader.read([tile], [memoryview(cast(Any, staged[: tile.span].numpy()))])
                self._copy(staged, tile, slot)
            finally:
                self._staging.put(staged)

    def _copy(self, source: torch.Tensor, tile: WeightTile, slot: int) -> None:
        pair = self._tensor[slot, : tile.nbytes], source[: tile.nbytes]
        event = self._device.copy([pair], self._freed[slot])
        event.synchronize()  # waits for this copy only: work that is queued goes on

    def view(self, slot: int, nbytes: int) -> torch.Tensor:
        return self._tensor[slot, :nbytes]

    def free(self, slot: int) -> None:
        self._freed[slot] = (self._device.mark(),)
