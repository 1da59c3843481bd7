"""Streams weight tiles: reader threads fetch them into a ring ahead of their use, pass after pass."""

import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence

import torch

from engines.offload.memory.layout import READERS, READS, WeightTile
from engines.offload.timeline import Timeline
from engines.offload.weights.ring import Ring
from harness.api import HarnessError


class WeightStream:
    """Hands out `tiles`, in this order, once per pass, each fetched into `ring` before it is due.

    `next` waits for the tile that is due and returns its bytes; `release` frees the slot of the oldest that is held.
    Readers run ahead by as many tiles as the ring has slots, across the end of a pass, and take adjacent tiles in one
    read. `skip` passes over the tile that is due; `decide` announces tiles that will be skipped. Tiles
    that are not among the `likely` (indices; None: all are) are not read before `decide` says that they are needed.
    What a reader raises, `next` raises. Without `ahead` a tile is read when it is asked for, and nothing else happens
    meanwhile. A ring whose fetches never block needs no readers: whoever frees a slot has the next tile fetched.

    Tiles are named by their index. Inside, a step counts tiles over all passes: step s is tiles[s % len(tiles)].
    """

    def __init__(
        self, tiles: Sequence[WeightTile], ring: Ring, timeline: Timeline, ahead: bool = True,
        likely: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        self.tiles = tiles
        self._position = {tile.index: i for i, tile in enumerate(tiles)}
        self._ring = ring
        self._due = 1 << 62 if ahead else -1  # the last step that readers may begin
        self._timeline = timeline
        self.slots = ring.slots
        self._most = 1 if ring.never_blocks else max(1, self.slots // READS)  # tiles per read
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)  # wakes readers: slots are free, or the stream has ended
        self._arrived = threading.Condition(self._lock)  # wakes the caller: tiles are there, or a reader has failed
        self._free = list(range(self.slots))
        self._next = 0  # the first step that no reader has begun
        self._slot: dict[int, int] = {}  # by step: tiles that are being read, ready or held
        self._ready: set[int] = set()
        self._left_out: set[int] = set()
        self._likely = {self._position[i] for i in (self._position if likely is None else likely)}
        self._needed: set[int] = set()  # steps of the others
        self._asked = -1  # the last step that the caller has asked for
        self._taken = 0  # the step that is due: tiles held, released or skipped so far
        self._held: deque[int] = deque()  # handed out and not released
        self._began = self._filled = time.perf_counter()
        self._failure: HarnessError | None = None
        self._closed = False
        self.bytes_read = 0
        count = 0 if ring.never_blocks else READERS
        self._readers = [threading.Thread(target=self._read, name=f"reader-{i}", daemon=True) for i in range(count)]
        try:
            for reader in self._readers if tiles else ():
                reader.start()
        except BaseException:  # the system's limit of threads
            self.close()
            raise
        with self._lock:
            self._wake()

    def measure(self) -> float:
        """Waits until the ring is full for the first time, and returns the rate in bytes/s. Raises as `next`."""
        with self._lock:
            if self._due < 0:  # without `ahead`, reading begins here
                self._began = time.perf_counter()
            last = self.slots - self._most  # later slots may stay free: a read waits for slots for all its tiles
            self._due = max(self._due, last)
            self._asked = last
            self._freed.notify_all()
            self._wake()
            self._wait_for(range(self._taken, last + 1))
        copying = self._ring.copy_seconds()
        return self.bytes_read / max(1e-9, self._filled - self._began if copying is None else copying)

    def next(self, index: int) -> torch.Tensor:
        """The bytes uint8 [nbytes] of tile `index`, which must be the one that is due; waits until they are there.

        Raises HarnessError with the file and offset at which a reader failed.
        """
        tile = self.tiles[self._taken % len(self.tiles)]
        if tile.index != index:
            raise HarnessError(f"the schedule asks for tile {index}, the stream has {tile}")
        began = self._timeline.begin()
        with self._lock:
            self._due = max(self._due, self._taken)
            self._asked = max(self._asked, self._taken)
            self._wake()
            self._wait_for((self._taken,))
            self._ready.discard(self._taken)
            self._needed.discard(self._taken)
            self._held.append(self._taken)
            slot = self._slot[self._taken]
            self._taken += 1
        if (on_its_way := self._ring.take(slot)) is not None:
            self._timeline.add("load", tile.matrix, *on_its_way)
        self._timeline.end("wait", "stall", began)
        return self._ring.view(slot, tile.nbytes)

    def is_ready(self) -> bool:
        """Whether `next` would not wait."""
        return self._taken in self._ready

    def has_begun(self, index: int) -> bool:
        """Whether a tile of this pass that is not due yet is in the ring, or on its way there."""
        with self._lock:
            return self._taken // len(self.tiles) * len(self.tiles) + self._position[index] in self._slot

    def release(self) -> None:
        """Frees the slot of the oldest tile that is held."""
        with self._lock:
            step = self._held.popleft()
            self._ring.free(self._slot[step])
            self._free_slot(step)

    def skip(self) -> None:
        """Passes over the tile that is due."""
        with self._lock:
            step = self._taken
            self._taken += 1
            self._needed.discard(step)
            if step in self._ready:
                self._ready.discard(step)
                self._free_slot(step)
            elif step not in self._slot and step >= self._next:
                self._left_out.add(step)
                self._wake()

    def decide(self, unneeded: Iterable[int], needed: Iterable[int] = ()) -> None:
        """Announces that tiles will be skipped in this pass, so that no reader begins them, and others will not."""
        with self._lock:
            first = self._taken // max(1, len(self.tiles)) * len(self.tiles)
            self._left_out.update(step for i in unneeded if (step := first + self._position[i]) >= self._next)
            self._needed.update(step for i in needed if (step := first + self._position[i]) >= self._next)
            self._wake()

    def align(self) -> None:
        """Skips to the start of the next pass, where a pass was broken off."""
        while self._held:
            self.release()
        while self.tiles and self._taken % len(self.tiles):
            self.skip()

    def close(self) -> None:
        """Ends the reader threads. Idempotent."""
        with self._lock:
            self._closed = True
            self._freed.notify_all()
            self._arrived.notify_all()
        for reader in self._readers:
            if reader.is_alive():
                reader.join()

    def _wait_for(self, steps: Iterable[int]) -> None:
        """Returns when the tiles of these steps are in the ring; the lock is held."""
        while not self._ready.issuperset(steps):
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise HarnessError("the weight stream was closed while a tile was waited for")
            self._arrived.wait(1.0)

    def _free_slot(self, step: int) -> None:
        """The lock is held."""
        self._free.append(self._slot.pop(step))
        self._wake()

    def _wake(self) -> None:
        """Wakes a reader if there is something to read, or reads it; the lock is held."""
        if not self._ring.never_blocks:
            if self._claimable():
                self._freed.notify()
            return
        while not self._closed and (steps := self._claimable()):
            self._begin(steps)
            self._fetch(steps)
            self._ready.update(steps)
            self._count(steps)

    def _begin(self, steps: range) -> None:
        """Gives steps their slots; the lock is held."""
        self._next = steps.stop
        self._slot.update((step, self._free.pop()) for step in steps)

    def _fetch(self, steps: range) -> bool:
        """See Ring.fetch."""
        tiles = [self.tiles[step % len(self.tiles)] for step in steps]
        return self._ring.fetch(tiles, [self._slot[step] for step in steps])

    def _count(self, steps: range) -> None:
        """Steps have been fetched; the lock is held."""
        self.bytes_read += sum(self.tiles[step % len(self.tiles)].span for step in steps)
        if steps.start < self.slots:
            self._filled = time.perf_counter()

    def _read(self) -> None:
        """A reader thread."""
        while steps := self._claim():
            first = self.tiles[steps.start % len(self.tiles)]
            began = time.perf_counter()
            try:
                there = self._fetch(steps)
            except Exception as exc:  # whatever it is, `next` must raise it
                with self._lock:
                    error = exc if isinstance(exc, HarnessError) else HarnessError(_failed(first, exc))
                    self._failure = self._failure or error
                    self._arrived.notify()
                    self._freed.notify_all()
                return
            ended = time.perf_counter()  # before anyone can go on with the tiles
            with self._lock:
                for step in steps:
                    if step < self._taken:  # skipped while it was read
                        self._free_slot(step)
                    else:
                        self._ready.add(step)
                self._count(steps)
                self._arrived.notify()
            if there:
                self._timeline.add("load", first.matrix, began, ended)

    def _claim(self) -> range:
        """The next steps to read, once their slots are free; empty when the stream has ended."""
        with self._lock:
            while not self._closed and self._failure is None:
                if steps := self._claimable():
                    self._begin(steps)
                    return steps
                self._freed.wait()
        return range(0)

    def _claimable(self) -> range:
        """The next steps whose tiles follow each other in a file, if there are slots for all; the lock is held."""
        if not self.tiles:
            return range(0)
        while self._next in self._left_out:
            self._left_out.discard(self._next)
            self._next += 1
        if self._next > self._due or self._must_wait(self._next):
            return range(0)
        stop = self._next + 1
        end = min(self._due + 1, self._next + self._most)
        while stop < end and stop not in self._left_out and not self._must_wait(stop) and self._follows(stop):
            stop += 1
        if self._next == self._taken:  # the caller waits for it, and may hold all other slots until it is there
            stop = min(stop, self._next + len(self._free))
        return range(self._next, stop) if stop - self._next <= len(self._free) else range(0)

    def _must_wait(self, step: int) -> bool:
        """Whether nobody has said yet that an unlikely tile is needed; the lock is held."""
        return step > self._asked and step % len(self.tiles) not in self._likely and step not in self._needed

    def _follows(self, step: int) -> bool:
        """Whether a step's tile follows the one before it in its file."""
        count = len(self.tiles)
        return self.tiles[step % count].follows(self.tiles[(step - 1) % count])


def _failed(tile: WeightTile, exc: Exception) -> str:
    reason = exc.strerror if isinstance(exc, OSError) else exc
    return f"reading {tile.file} at byte {tile.offset} ({tile.matrix}): {reason}"
