"""Fetches weight tiles ahead of the arithmetic, pass after pass, into a ring of slots."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from engines.offload.memory.layout import READERS, WeightTile
from engines.offload.timeline import Timeline
from engines.offload.weights.ring import Ring
from harness.api import HarnessError

#: How many reads fill the ring: large ones wake few threads and keep a disk's queue as full as many small ones.
_READS = 4


class WeightStream:
    """The tiles of `order`, again and again, each fetched into `ring`, which is closed with it, before it is asked
    for.

    `next` hands out the tile that is due, and `release` gives its slot back to the readers: they run ahead by as
    many tiles as there are slots, across the end of a pass too, and read neighbours at once. `skip` goes past a
    tile that turns out not to be needed, and `leave_out` says so in advance. A reader's error is raised by `next`.
    Without `ahead` a tile is read when it is asked for, and nothing else happens meanwhile.
    """

    def __init__(self, order: Sequence[WeightTile], ring: Ring, timeline: Timeline, ahead: bool = True) -> None:
        self._order = order
        self._ring = ring
        self._due = 1 << 62 if ahead else -1  # no reader begins a tile beyond this one
        self._timeline = timeline
        self.slots = ring.slots
        self._most = max(1, self.slots // _READS)  # tiles that one read takes
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)  # for readers: slots are free, or the stream is over
        self._arrived = threading.Condition(self._lock)  # for the caller: tiles are there, or a reader has failed
        self._free = list(range(self.slots))
        self._next = 0  # the first tile that no reader has begun, counted over all passes as all of these
        self._slot: dict[int, int] = {}  # by tile that is being read, ready or handed out
        self._ready: set[int] = set()
        self._left_out: set[int] = set()
        self._taken = 0  # tiles handed out or skipped
        self._held: deque[int] = deque()  # tiles handed out and not yet released
        self._began = self._filled = time.perf_counter()
        self._failure: HarnessError | None = None
        self._closed = False
        self.bytes_read = 0
        self._readers = [threading.Thread(target=self._read, name=f"reader-{i}", daemon=True) for i in range(READERS)]
        try:
            for reader in self._readers if order else ():
                reader.start()
        except BaseException:  # as many threads as the system allows
            self.close()
            raise

    def measure(self) -> float:
        """Bytes/s of the first tiles, read to fill the ring; waits for it. Raises as `next`."""
        with self._lock:
            if self._due < 0:  # nothing has been asked for before
                self._began = time.perf_counter()
            last = self.slots - self._most  # later slots may stay free: a read waits until it can take all neighbours
            self._ask_for(last)
            self._wait_for(range(self._taken, last + 1))
        return self.bytes_read / max(1e-9, self._filled - self._began)

    def next(self, tile: WeightTile) -> torch.Tensor:
        """The bytes [nbytes] uint8 of `tile`, which must be the one that is due; waits until they are there.

        Raises HarnessError with file and offset for what a reader met.
        """
        due = self._order[self._taken % len(self._order)]
        if due != tile:
            raise HarnessError(f"the schedule asks for {tile}, the stream has {due}")
        began = time.perf_counter()
        with self._lock:
            self._ask_for(self._taken)
            self._wake()
            self._wait_for((self._taken,))
            self._ready.discard(self._taken)
            self._held.append(self._taken)
            slot = self._slot[self._taken]
            self._taken += 1
        self._timeline.add("wait", "stall", began, time.perf_counter())
        return self._ring.view(slot, tile.nbytes)

    def release(self) -> None:
        """Of what was handed out the oldest is no longer needed."""
        with self._lock:
            index = self._held.popleft()
            self._ring.leave(self._slot[index])
            self._give_back(index)

    def skip(self) -> None:
        """The tile that is due is not needed."""
        with self._lock:
            index = self._taken
            self._taken += 1
            if index in self._ready:
                self._ready.discard(index)
                self._give_back(index)
            elif index not in self._slot and index >= self._next:
                self._left_out.add(index)
                self._wake()

    def leave_out(self, places: Sequence[int]) -> None:
        """The tiles at these places of the order will be skipped in this pass: no reader need begin them."""
        with self._lock:
            first = self._taken // max(1, len(self._order)) * len(self._order)
            self._left_out.update(i for p in places if (i := first + p) >= self._next)
            self._wake()

    def align(self) -> None:
        """Goes on to the start of the order, where a pass that was broken off has left it elsewhere."""
        while self._held:
            self.release()
        while self._order and self._taken % len(self._order):
            self.skip()

    def close(self) -> None:
        """Ends the readers. Idempotent."""
        with self._lock:
            self._closed = True
            self._freed.notify_all()
            self._arrived.notify_all()
        for reader in self._readers:
            if reader.is_alive():
                reader.join()
        self._ring.close()

    def _ask_for(self, index: int) -> None:
        """Readers may go as far as this tile; the lock is held."""
        if index > self._due:
            self._due = index
            self._freed.notify_all()

    def _wait_for(self, indices: Iterable[int]) -> None:
        """Returns with these tiles in the ring; the lock is held."""
        while not self._ready.issuperset(indices):
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise HarnessError("the weight stream was closed under its reader")
            self._arrived.wait(1.0)

    def _give_back(self, index: int) -> None:
        """Frees the slot of a tile; the lock is held."""
        self._free.append(self._slot.pop(index))
        self._wake()

    def _wake(self) -> None:
        """Tells a reader if there is something to do; the lock is held."""
        if self._claimable():
            self._freed.notify()

    def _read(self) -> None:
        while run := self._claim():
            tiles = [self._order[i % len(self._order)] for i in run]
            began = time.perf_counter()
            try:
                self._ring.fetch(tiles, [self._slot[i] for i in run])
            except Exception as exc:  # must reach whoever waits, whatever it is
                with self._lock:
                    error = exc if isinstance(exc, HarnessError) else HarnessError(_words(tiles[0], exc))
                    self._failure = self._failure or error
                    self._arrived.notify()
                    self._freed.notify_all()
                return
            ended = time.perf_counter()  # before anybody can go on with it
            with self._lock:
                for i in run:
                    if i < self._taken:  # skipped while it was read
                        self._give_back(i)
                    else:
                        self._ready.add(i)
                self.bytes_read += sum(b.span for b in tiles)
                if run.start < self.slots:
                    self._filled = time.perf_counter()
                self._arrived.notify()
            self._timeline.add("load", tiles[0].matrix, began, ended)

    def _claim(self) -> range:
        """The next tiles to read, once their slots are free; none when the stream is over."""
        with self._lock:
            while not self._closed and self._failure is None:
                if run := self._claimable():
                    self._next = run.stop
                    self._slot.update((i, self._free.pop()) for i in run)
                    return run
                self._freed.wait()
        return range(0)

    def _claimable(self) -> range:
        """The next tiles to read that lie one after the other in their file, if there are slots for them."""
        if not self._order:
            return range(0)
        while self._next in self._left_out:
            self._left_out.discard(self._next)
            self._next += 1
        if self._next > self._due:
            return range(0)
        stop = self._next + 1
        end = min(self._due + 1, self._next + self._most)
        while stop < end and stop not in self._left_out and self._follows(stop):
            stop += 1
        if self._next == self._taken:  # somebody waits for it, and may hold all other slots until it is there
            stop = min(stop, self._next + len(self._free))
        return range(self._next, stop) if stop - self._next <= len(self._free) else range(0)

    def _follows(self, index: int) -> bool:
        """Whether tile `index` lies right after the one before it."""
        before, tile = (self._order[i % len(self._order)] for i in (index - 1, index))
        return before.file == tile.file and before.offset + before.span == tile.offset


def _words(tile: WeightTile, exc: Exception) -> str:
    reason = exc.strerror if isinstance(exc, OSError) else exc
    return f"reading {tile.file} at byte {tile.offset} ({tile.matrix}): {reason}"
