"""Reads weight tiles from the files of a converted checkpoint, past the page cache."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from engines.offload.disk.direct_file import reads_directly
from engines.offload.disk.throttle import Throttle
from engines.offload.memory.layout import WeightTile
from harness.api import HarnessError
from harness.common.buffers import direct_buffer


class TileReader:
    """Reads `tiles` from the files in `folder`, in any thread. Whoever makes a reader closes it, and with it the files.

    `direct`: whether reads bypass the page cache (O_DIRECT). Where the file system refuses that, what was read is
    dropped from the cache, so that a later run does not find in memory what it is to read from disk.
    """

    def __init__(self, folder: Path, tiles: Sequence[WeightTile], throttle: Throttle) -> None:
        self._throttle = throttle
        names = sorted({tile.file for tile in tiles})
        self.direct = all(reads_directly(folder / name) for name in names[:1])
        flags = os.O_RDONLY | (os.O_DIRECT if self.direct else 0)
        self._files: dict[str, int] = {}
        try:
            for name in names:
                self._files[name] = os.open(folder / name, flags)
        except OSError:
            self.close()
            raise

    def read(self, tiles: Sequence[WeightTile], buffers: Sequence[torch.Tensor]) -> None:
        """Reads tiles that follow each other in a file, each into its buffer uint8 [span], at the throttle's rate.

        Buffers are page-aligned. Raises HarnessError for a file that is too short, OSError for what the disk reports.
        """
        began = time.perf_counter()
        self._throttle.wait(self._fill(tiles, buffers), began)

    def load(self, tile: WeightTile, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """A tile's bytes uint8 [nbytes] in `buffer`, page-aligned and of at least `span` bytes, or in new memory.

        Not throttled: a slower disk is imitated for passes, not for loading. Raises as `read`.
        """
        target = page_aligned(tile.span) if buffer is None else buffer[: tile.span]
        self._fill([tile], [target])
        return target[: tile.nbytes]

    def close(self) -> None:
        """Idempotent."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def _fill(self, tiles: Sequence[WeightTile], buffers: Sequence[torch.Tensor]) -> int:
        """Reads adjacent tiles; returns the number of bytes."""
        rest = [memoryview(cast(Any, buffer.numpy())) for buffer in buffers]
        descriptor, offset = self._files[tiles[0].file], tiles[0].offset
        while rest:
            count = os.preadv(descriptor, rest, offset)
            if count <= 0:
                raise HarnessError(_truncated(tiles, os.fstat(descriptor).st_size))
            if not self.direct:
                os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)
            offset += count
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = rest[0][count:]
        return offset - tiles[0].offset


def page_aligned(nbytes: int) -> torch.Tensor:
    """New memory for direct I/O, uint8 [nbytes]."""
    return torch.frombuffer(direct_buffer(max(1, nbytes)), dtype=torch.uint8)[:nbytes]


def _truncated(tiles: Sequence[WeightTile], end: int) -> str:
    """The message for a file of `end` bytes, which should hold these tiles."""
    tile = next((t for t in tiles if t.offset + t.span > end), tiles[-1])
    return (
        f"{tile.file} ends at byte {end}, {tile.matrix} reaches to {tile.offset + tile.span}: the file was truncated; "
        "remove its folder, and the checkpoint will be converted again"
    )
