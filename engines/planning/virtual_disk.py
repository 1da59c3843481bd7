"""The disk in virtual time: weights, KV blocks and activations take turns on it."""

from bisect import bisect_right
from operator import itemgetter

from engines.offload.memory.kv_blocks import STAGES
from engines.offload.timeline import Timeline

#: Idle intervals that are kept for transfers which were ready earlier.
_GAPS = 64


class VirtualDisk:
    """A disk that reads and writes so many bytes/s, and records its work in `timeline`.

    Transfers arrive in the order in which they are needed, not in which they become ready. One that was ready while the
    disk was idle is done in that idle time.
    """

    def __init__(self, read: float, write: float, timeline: Timeline) -> None:
        self._read = read
        self._write = write
        self._timeline = timeline
        #: Factor by which reads take longer, beside products.
        self.read_slowdown = 1.0
        #: The time from which on it is idle.
        self.free = 0.0
        self._gaps: list[tuple[float, float]] = []  # in their order

    def read(self, lane: str, name: str, nbytes: float, ready: float) -> float:
        """Reads bytes that may be read from time `ready` on; returns when they are in memory."""
        return self._move(lane, name, self.read_slowdown * nbytes / self._read, ready)

    def write(self, lane: str, name: str, nbytes: float, ready: float) -> float:
        """Writes bytes that exist from time `ready` on; returns when they are on disk."""
        return self._move(lane, name, nbytes / self._write, ready)

    def _move(self, lane: str, name: str, seconds: float, ready: float) -> float:
        if not seconds:
            return ready
        for start, end in self._reserve(seconds, ready):
            self._timeline.add(lane, name, start, end)
        return end

    def _reserve(self, seconds: float, ready: float) -> list[tuple[float, float]]:
        """Intervals of disk time for a transfer: idle ones from `ready` on first, then from when the disk is free."""
        intervals, gaps = [], self._gaps
        at = bisect_right(gaps, ready, key=itemgetter(1))  # the first that ends later
        while at < len(gaps):
            low, high = gaps[at]
            start = max(low, ready)
            end = min(high, start + seconds)
            intervals.append((start, end))
            rest = [gap for gap in ((low, start), (end, high)) if gap[0] < gap[1]]
            gaps[at : at + 1] = rest
            if start + seconds <= high:
                del gaps[:-_GAPS]
                return intervals
            seconds -= end - start
            at += len(rest)
        start = max(self.free, ready)
        if start > self.free:
            gaps.append((self.free, start))
            del gaps[:-_GAPS]
        self.free = start + seconds
        return [*intervals, (start, self.free)]


class VirtualBlocks:
    """KV blocks on disk, moved as kv_cache/disk_blocks.py does: `STAGES` layers ahead, writes in order with reads.

    record: bytes of a block in one layer.
    ahead: without it, a layer is read when it is needed, and written before its batches go on.
    """

    def __init__(self, disk: VirtualDisk, layers: int, record: int, ahead: bool) -> None:
        self._disk = disk
        self._layers = layers
        self._record = record
        self._ahead = STAGES if ahead else 0
        self._thread_free = 0.0  # of the thread that keeps reads and writes in order

    def start(self, filled: int, written: int, batches: int, now: float) -> None:
        """Starts a pass of `batches` batches that reads `filled` blocks and writes `written`."""
        self._read_bytes, self._write_bytes = filled * self._record, written * self._record
        self._inside = [batches] * self._layers  # by layer, batches that have not left it
        self._ready: list[float] = []  # by requested layer, when its blocks are in memory
        for _ in range(min(self._ahead, self._layers)):
            self._request(now)

    def staged(self, layer: int, now: float) -> float:
        """When a layer's blocks are in memory."""
        if layer == len(self._ready):
            self._request(now)
        return self._ready[layer]

    def leave(self, layer: int, now: float) -> float:
        """A batch has attended in a layer; returns when it may go on."""
        self._inside[layer] -= 1
        if self._inside[layer]:
            return now
        ready = max(self._thread_free, now)
        self._thread_free = self._disk.write("cache", f"write layer {layer}", self._write_bytes, ready)
        if not self._ahead:
            return self._thread_free
        if len(self._ready) < self._layers:
            self._request(now)
        return now

    def _request(self, now: float) -> None:
        name = f"read layer {len(self._ready)}"
        self._thread_free = self._disk.read("cache", name, self._read_bytes, max(self._thread_free, now))
        self._ready.append(self._thread_free)
