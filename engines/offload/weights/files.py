"""The files that weight tiles lie in, read past the page cache."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from engines.offload.disk.direct_file import reads_directly
from engines.offload.disk.throttle import Throttle
from engines.offload.memory.layout import WeightTile
from harness.api import HarnessError


class WeightFiles:
    """The files of `tiles` in `folder`, open until `close`.

    `direct`: whether reads bypass the page cache, which some file systems refuse; what was read is then dropped from
    there, for a later run must not find in memory what it is to read from disk.
    """

    def __init__(self, folder: Path, tiles: Sequence[WeightTile], throttle: Throttle) -> None:
        self._throttle = throttle
        self._files, self.direct = _open_all(folder, sorted({b.file for b in tiles}))

    def read(self, tiles: Sequence[WeightTile], views: Sequence[memoryview]) -> None:
        """Reads neighbouring tiles, each into its view of `span` bytes. Raises HarnessError or OSError."""
        rest = list(views)
        descriptor, offset, began = self._files[tiles[0].file], tiles[0].offset, time.perf_counter()
        while rest:
            count = os.preadv(descriptor, rest, offset)
            if count <= 0:
                raise HarnessError(_cut_words(tiles, os.fstat(descriptor).st_size))
            if not self.direct:
                os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)
            offset += count
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = rest[0][count:]
        self._throttle.wait(offset - tiles[0].offset, began)

    def close(self) -> None:
        """Idempotent."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}


def _open_all(folder: Path, names: Sequence[str]) -> tuple[dict[str, int], bool]:
    """Descriptors by file name, and whether reads bypass the page cache; some file systems refuse that."""
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


def _cut_words(tiles: Sequence[WeightTile], end: int) -> str:
    """For a file that ends before these tiles do."""
    tile = next((b for b in tiles if b.offset + b.span > end), tiles[-1])
    return (
        f"{tile.file} ends at byte {end}, {tile.matrix} reaches to {tile.offset + tile.span}: it was cut; "
        "remove its folder, and it will be converted again"
    )
