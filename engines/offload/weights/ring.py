"""Where streamed weight tiles arrive: slots in host memory, filled from disk, or on a device, filled by way of it."""

import math
import queue
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from engines.offload.device.protocol import Accelerator, Event
from engines.offload.memory.layout import WeightTile
from engines.offload.weights.tile_reader import TileReader, page_aligned


class Ring(ABC):
    """Slots for one tile each: the rows of `buffers` uint8 [slots, bytes]."""

    def __init__(self, buffers: torch.Tensor) -> None:
        self.slots = len(buffers)
        self._buffers = buffers

    @abstractmethod
    def fetch(self, tiles: Sequence[WeightTile], slots: Sequence[int]) -> None:
        """Fills slots with tiles that follow each other in their file, and returns when they are there; for any thread.

        Raises HarnessError or OSError, as TileReader.read.
        """

    @abstractmethod
    def free(self, slot: int) -> None:
        """All work on a slot's tile has been issued: the slot may be overwritten when that work is done."""

    def view(self, slot: int, nbytes: int) -> torch.Tensor:
        """The bytes uint8 [nbytes] of the tile in a slot."""
        return self._buffers[slot, :nbytes]


class HostRing(Ring):
    """Slots in host memory, filled by `reader`."""

    def __init__(self, tiles: Sequence[WeightTile], slots: int, reader: TileReader) -> None:
        size = _size(tiles, slots)
        super().__init__(page_aligned(math.prod(size)).view(size).zero_())  # else the first reads allocate its pages
        self._reader = reader

    def fetch(self, tiles: Sequence[WeightTile], slots: Sequence[int]) -> None:
        self._reader.read(tiles, [self.view(slot, tile.span) for slot, tile in zip(slots, tiles, strict=True)])

    def free(self, slot: int) -> None:
        """On the host, work is done when it has been issued."""


class DeviceRing(Ring):
    """Slots on a device. A tile comes from `pinned` host memory (by index), or from disk through a staging buffer.

    As many threads may fetch at once as there are `staging` buffers, pinned and of the largest tile's span.
    """

    def __init__(
        self, tiles: Sequence[WeightTile], slots: int, pinned: Mapping[int, torch.Tensor], reader: TileReader,
        device: Accelerator, staging: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        super().__init__(torch.empty(_size(tiles, slots), dtype=torch.uint8, device=device.where))
        self._pinned = pinned
        self._reader = reader
        self._device = device
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
                self._reader.read([tile], [staged[: tile.span]])
                self._copy(staged, tile, slot)
            finally:
                self._staging.put(staged)

    def free(self, slot: int) -> None:
        self._freed[slot] = (self._device.mark(),)

    def _copy(self, source: torch.Tensor, tile: WeightTile, slot: int) -> None:
        event = self._device.copy([(self.view(slot, tile.nbytes), source[: tile.nbytes])], self._freed[slot])
        event.synchronize()  # waits for this copy only: work that is queued goes on


def _size(tiles: Sequence[WeightTile], slots: int) -> tuple[int, int]:
    """Slots, at most one a tile, and the bytes of each."""
    return min(slots, len(tiles)), max((tile.span for tile in tiles), default=0)
