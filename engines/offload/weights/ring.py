"""Where streamed weight tiles arrive: slots in host memory, filled from disk, or on a device, filled by way of it."""

import math
import queue
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engines.offload.device.protocol import Accelerator, Event
from engines.offload.memory.layout import WeightTile
from engines.offload.weights.tile_reader import TileReader, page_aligned


class Ring(ABC):
    """Slots for one tile each: the rows of `buffers` uint8 [slots, bytes]."""

    #: Whether no fetch blocks, so that it needs no thread of its own.
    never_blocks = False

    def __init__(self, buffers: torch.Tensor) -> None:
        self.slots = len(buffers)
        self._buffers = buffers

    @abstractmethod
    def fetch(self, tiles: Sequence[WeightTile], slots: Sequence[int]) -> bool:
        """Fills slots with tiles that follow each other in their file, and returns True when they are there, or False
        where they are on their way to who will `take` them; for any thread.

        Raises HarnessError or OSError, as TileReader.read.
        """

    def take(self, slot: int) -> tuple[Any, Any] | None:
        """Makes work issued from here on wait for the copy into a slot. Returns the copy's stamps (start, end); None
        where the slot was filled before."""
        return None

    def copy_seconds(self) -> float | None:
        """Waits for all copies that `fetch` began; returns the seconds from the first start to the last end, None
        where `fetch` blocks."""
        return None

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

    def fetch(self, tiles: Sequence[WeightTile], slots: Sequence[int]) -> bool:
        self._reader.read(tiles, [self.view(slot, tile.span) for slot, tile in zip(slots, tiles, strict=True)])
        return True

    def free(self, slot: int) -> None:
        """On the host, work is done when it has been issued."""


class DeviceRing(Ring):
    """Slots on a device. A tile comes from `pinned` host memory (by index), or from disk through a staging buffer.

    As many threads may fetch at once as there are `staging` buffers, pinned and of the largest tile's span. Copies from
    `pinned` are only begun, so that the host runs ahead of the device: it waits for a slot, and work for the copy, on
    the device itself.
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
        self._copied: list[tuple[Event, Event] | None] = [None] * self.slots  # by slot, since when and when it is there
        self.never_blocks = all(tile.index in pinned for tile in tiles)
        self._staging: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for buffer in staging:
            self._staging.put(buffer)

    def fetch(self, tiles: Sequence[WeightTile], slots: Sequence[int]) -> bool:
        there = False
        for tile, slot in zip(tiles, slots, strict=True):
            if (pinned := self._pinned.get(tile.index)) is not None:
                self._copied[slot] = self._copy(pinned, tile, slot)
                continue
            staged = self._staging.get()
            try:
                self._reader.read([tile], [staged[: tile.span]])
                self._copy(staged, tile, slot)[1].synchronize()  # for this copy only: work that is queued goes on
                self._copied[slot], there = None, True
            finally:
                self._staging.put(staged)
        return there

    def take(self, slot: int) -> tuple[Event, Event] | None:
        copied, self._copied[slot] = self._copied[slot], None
        if copied is not None:
            self._device.wait_event(copied[1])
        return copied

    def copy_seconds(self) -> float | None:
        stamps = [stamp for copied in self._copied if copied is not None for stamp in copied]
        for stamp in stamps:
            stamp.synchronize()
        seconds = self._device.seconds(stamps)
        return max(seconds) - min(seconds) if self.never_blocks and seconds else None

    def free(self, slot: int) -> None:
        self._freed[slot] = (self._device.mark(),)

    def _copy(self, source: torch.Tensor, tile: WeightTile, slot: int) -> tuple[Event, Event]:
        return self._device.timed_copy(self.view(slot, tile.nbytes), source[: tile.nbytes], self._freed[slot])


def _size(tiles: Sequence[WeightTile], slots: int) -> tuple[int, int]:
    """Slots, at most one a tile, and the bytes of each."""
    return min(slots, len(tiles)), max((tile.span for tile in tiles), default=0)
