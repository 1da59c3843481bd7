"""Reads weight blocks from disk ahead of the arithmetic, pass after pass, into a ring of slots."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from engines.offload.layout import Block
from engines.offload.timeline import Timeline
from harness.api import HarnessError

_READERS = 3


class BlockStream:
    """The blocks of `order`, again and again, each read by direct I/O before it is asked for.

    `next` hands out the block that is due, and `release` gives its slot back to the readers: they run ahead by as
    many blocks as there are slots, across the end of a pass too. The page cache is bypassed, where the file
    system allows it, so that it neither flatters nor takes memory. A reader's error is raised by `next`.
    """

    def __init__(self, folder: Path, order: Sequence[Block], slots: int, timeline: Timeline) -> None:
        self._order = order
        self._timeline = timeline
        self._files, self.direct = _open_all(folder, sorted({b.file for b in order}))
        self._slot_bytes = max((b.span for b in order), default=0)
        self.slots = min(slots, len(order))
        self._ring = mmap.mmap(-1, max(1, self._slot_bytes * self.slots))  # page-aligned, as direct I/O needs
        self._memory = memoryview(self._ring)
        self._tensor = torch.frombuffer(self._ring, dtype=torch.uint8)
        self._changed = threading.Condition()
        self._claimed = 0  # blocks that a reader has begun
        self._ready: set[int] = set()
        self._taken = 0  # blocks handed out
        self._released = 0
        self._began = self._filled = time.perf_counter()
        self._failure: HarnessError | None = None
        self._closed = False
        self.bytes_read = 0
        self._readers = [threading.Thread(target=self._read, name=f"reader-{i}", daemon=True) for i in range(_READERS)]
        if order:
            for reader in self._readers:
                reader.start()

    @property
    def nbytes(self) -> int:
        """Memory of the ring."""
        return self._slot_bytes * self.slots

    def measure(self) -> float:
        """Bytes/s of the first blocks, read to fill the ring; waits for it. Raises as `next`."""
        with self._changed:
            while len(self._ready) < self.slots:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(1.0)
        return self.bytes_read / max(1e-9, self._filled - self._began)

    def next(self, block: Block) -> torch.Tensor:
        """The bytes [nbytes] uint8 of `block`, which must be the one that is due; waits until they are there.

        Raises HarnessError with file and offset for what a reader met.
        """
        due = self._order[self._taken % len(self._order)]
        if due != block:
            raise HarnessError(f"the schedule asks for {block}, the stream has {due}")
        began = time.perf_counter()
        with self._changed:
            while self._taken not in self._ready:
                if self._failure is not None:
                    raise self._failure
                if self._closed:
                    raise HarnessError("the weight stream was closed under its reader")
                self._changed.wait(1.0)
            self._ready.discard(self._taken)
        self._timeline.add("wait", "stall", began, time.perf_counter())
        start = self._taken % self.slots * self._slot_bytes
        self._taken += 1
        return self._tensor[start : start + block.nbytes]

    def align(self) -> None:
        """Goes on to the start of the order, where a pass that was broken off has left it elsewhere."""
        self.release()
        while self._order and self._taken % len(self._order):
            self.next(self._order[self._taken % len(self._order)])
            self.release()

    def release(self) -> None:
        """The block handed out last is no longer needed."""
        with self._changed:
            self._released = self._taken
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the readers. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for reader in self._readers:
            if reader.is_alive():
                reader.join()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def _read(self) -> None:
        while (index := self._claim()) is not None:
            block = self._order[index % len(self._order)]
            began = time.perf_counter()
            try:
                self._fetch(block, index % self.slots * self._slot_bytes)
            except Exception as exc:  # must reach whoever waits, whatever it is
                with self._changed:
                    self._failure = exc if isinstance(exc, HarnessError) else HarnessError(_words(block, exc))
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.add(index)
                self.bytes_read += block.span
                if index < self.slots:
                    self._filled = time.perf_counter()
                self._changed.notify_all()
            self._timeline.add("load", block.matrix, began, time.perf_counter())

    def _claim(self) -> int | None:
        """The next block to read, once a slot is free for it; None when the stream is over."""
        with self._changed:
            while not self._closed and self._failure is None:
                if self._claimed - self._released < self.slots:
                    self._claimed += 1
                    return self._claimed - 1
                self._changed.wait()
        return None

    def _fetch(self, block: Block, start: int) -> None:
        done = 0
        while done < block.span:
            view = self._memory[start + done : start + block.span]
            count = os.preadv(self._files[block.file], [view], block.offset + done)
            if count <= 0:
                raise HarnessError(
                    f"{block.file} ends at byte {block.offset + done}, inside {block.matrix}: it was cut; "
                    "remove its folder, and it will be converted again"
                )
            done += count


def _open_all(folder: Path, names: Sequence[str]) -> tuple[dict[str, int], bool]:
    """Descriptors by file name, and whether reads bypass the page cache; some file systems refuse that."""
    direct = os.O_DIRECT
    files: dict[str, int] = {}
    for name in names:
        try:
            files[name] = os.open(folder / name, os.O_RDONLY | direct)
        except OSError:
            direct = 0
            files[name] = os.open(folder / name, os.O_RDONLY)
    return files, bool(direct)


def _words(block: Block, exc: Exception) -> str:
    reason = exc.strerror if isinstance(exc, OSError) else exc
    return f"reading {block.file} at byte {block.offset} ({block.matrix}): {reason}"
