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
        self._files, self.direct = _open_all(folder, sorted({tile.file for tile in tiles}))

    def read(self, tiles: Sequence[WeightTile], buffers: Sequence[memoryview]) -> None:
        """Reads tiles that follow each other in a file, each into its buffer of `span` bytes, at the throttle's rate.

        Buffers are page-aligned. Raises HarnessError for a file that is too short, OSError for what the disk reports.
        """
        began = time.perf_counter()
        self._throttle.wait(self._fill(tiles, buffers), began)

    def load(self, tile: WeightTile, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """A tile's bytes uint8 [nbytes] in `buffer`, page-aligned and of at least `span` bytes, or in new memory.

        Not throttled: a slower disk is imitated for passes, not for loading. Raises as `read`.
        """
        target = page_aligned(tile.span) if buffer is None else buffer[: tile.span]
        self._fill([tile], [memoryview(cast(Any, target.numpy()))])
        return target[: tile.nbytes]

    def close(self) -> None:
        """Idempotent."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def _fill(self, tiles: Sequence[WeightTile], buffers: Sequence[memoryview]) -> int:
        """Reads adjacent tiles; returns the number of bytes."""
        rest = list(buffers)
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
    return torch.frombuffer(direct_buffer(nbytes), dtype=torch.uint8)


def _open_all(folder: Path, names: Sequence[str]) -> tuple[dict[str, int], bool]:
    """Descriptors by file name, and whether they are open for direct I/O."""
    direct = all(reads_directly(folder / name) for name in names[:1])
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    files: dict[str, int] = {}
    try:
        for name in names:
            files[name] = os.open(folder / name, flags)
    except OSError:
        for descriptor in files.values():
            os.close(descriptor)
        raise
    return files, direct


def _truncated(tiles: Sequence[WeightTile], end: int) -> str:
    """The message for a file of `end` bytes, which should hold these tiles."""
    tile = next((t for t in tiles if t.offset + t.span > end), tiles[-1])
    return (
        f"{tile.file} ends at byte {end}, {tile.matrix} reaches to {tile.offset + tile.span}: the file was truncated; "
        "remove its folder, and the checkpoint will be converted again"
    )
