"""The disk in virtual time: weights, cache blocks and activations take turns on it."""

from __future__ import annotations

from collections import deque

from engines.offload.memory.kv_blocks import STAGES
from engines.offload.timeline import Timeline

#: Idle times that are remembered.
_GAPS = 64


class VirtualDisk:
    """One disk that reads and writes so many bytes/s; what it does is noted in `timeline`.

    Transfers are told in the order in which they are needed, not in that in which they are ready: one that was ready
    while the disk was idle takes that time.
    """

    def __init__(self, read: float, write: float, timeline: Timeline) -> None:
        self._read = read
        self._write = write
        self._timeline = timeline
        self._free = 0.0
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_GAPS)

    @property
    def free(self) -> float:
        """From when on it does nothing."""
        return self._free

    def rest_until(self, free: float) -> None:
        """It has worked until then."""
        self._free = free

    def read(self, lane: str, name: str, nbytes: float, ready: float) -> float:
        """When so many bytes are there that may be read from `ready` on."""
        return self._move(lane, name, nbytes / self._read, ready)

    def write(self, lane: str, name: str, nbytes: float, ready: float) -> float:
        """When so many bytes are written that are there from `ready` on."""
        return self._move(lane, name, nbytes / self._write, ready)

    def _move(self, lane: str, name: str, seconds: float, ready: float) -> float:
        if not seconds:
            return ready
        for began, ended in self._take(seconds, ready):
            self._timeline.add(lane, name, began, ended)
        return ended

    def _take(self, seconds: float, ready: float) -> list[tuple[float, float]]:
        """When the disk works on it: from `ready` on, first where it was idle."""
        found = []
        if self._gaps and ready < self._gaps[-1][1]:
            gaps, self._gaps = self._gaps, deque(maxlen=_GAPS)
            for low, high in gaps:
                began = max(low, ready)
                ended = min(high, began + seconds)
                if ended > began:
                    found.append((began, ended))
                    seconds -= ended - began
                    self._gaps.extend(gap for gap in ((low, began), (ended, high)) if gap[0] < gap[1])
                else:
                    self._gaps.append((low, high))
            if found and seconds <= 0:
                return found
        began = max(self._free, ready)
        if began > self._free:
            self._gaps.append((self._free, began))
        self._free = began + seconds
        return [*found, (began, self._free)]


class VirtualBlocks:
    """Blocks of the cache on disk, as kv_disk.py moves them: read `STAGES` layers ahead, written back in the same
    order.

    `record`: bytes of a block in a layer. Without `ahead` a layer is read when it is asked for and written before its
    batches go on.
    """

    def __init__(self, disk: VirtualDisk, layers: int, record: int, ahead: bool) -> None:
        self._disk = disk
        self._layers = layers
        self._record = record
        self._ahead = STAGES if ahead else 0
        self._kept = 0.0  # when the thread that keeps their order is free

    def start(self, known: int, touched: int, batches: int, now: float) -> None:
        """A pass begins: so many blocks hold something, so many will be written."""
        self._known, self._touched = known * self._record, touched * self._record
        self._inside = [batches] * self._layers  # by layer, the batches that have not left it
        self._ready: list[float] = []  # of each layer that was asked for, when it is there
        for _ in range(min(self._ahead, self._layers)):
            self._ask(now)

    def staged(self, layer: int, now: float) -> float:
        """When a layer's blocks are there."""
        if layer == len(self._ready):
            self._ask(now)
        return self._ready[layer]

    def leave(self, layer: int, now: float) -> float:
        """A batch has attended in a layer; when it may go on."""
        self._inside[layer] -= 1
        if self._inside[layer]:
            return now
        self._kept = self._disk.write("cache", f"write layer {layer}", self._touched, max(self._kept, now))
        if not self._ahead:
            return self._kept
        if len(self._ready) < self._layers:
            self._ask(now)
        return now

    def _ask(self, now: float) -> None:
        name = f"read layer {len(self._ready)}"
        self._kept = self._disk.read("cache", name, self._known, max(self._kept, now))
        self._ready.append(self._kept)
