"""A checkpoint converted once into aligned files in the order of use, shared by all who run the model."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engines.common.folders import build_once
from engines.models import file_digest as content
from engines.models import shards
from engines.offload.kernels import Quantizer
from engines.offload.memory.layout import Matrix, WeightTile
from engines.offload.memory.storage import Plain, Storage
from engines.offload.weights.checkpoint_reader import CheckpointReader
from harness.api import HarnessError, LocalModel

#: Part of a folder's name: raise it when the files of the same checkpoint are laid out differently.
_LAYOUT = 1
_SMALL = "small.safetensors"
_PIECE = 4 << 20


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """A converted checkpoint: where its tiles are, in order of use. Tables and small tensors are read by name."""

    folder: Path
    dtype: torch.dtype
    tiles: tuple[WeightTile, ...]
    tables: Mapping[str, tuple[int, int]]

    def check(self) -> None:
        """Raises HarnessError for a file that is missing or was cut since it was written."""
        sizes = {b.file: 0 for b in self.tiles} | {_SMALL: 1}
        for tile in self.tiles:
            sizes[tile.file] = max(sizes[tile.file], tile.offset + tile.span)
        sizes |= {_table_file(name): a * b * self.dtype.itemsize for name, (a, b) in self.tables.items()}
        for name, size in sizes.items():
            path = self.folder / name
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                raise HarnessError(f"{path} has {found} of {size} bytes; remove its folder: it is converted again")

    def table(self, name: str) -> torch.Tensor:
        """An embedding [entries, width] mapped from its file without read-ahead: a lookup reads the rows it needs."""
        shape = self.tables[name]
        with (self.folder / _table_file(name)).open("rb") as file:
            # a private mapping, because torch wants to be able to write; nobody does
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapped.madvise(mmap.MADV_RANDOM)
        return torch.frombuffer(mapped, dtype=self.dtype, count=shape[0] * shape[1]).view(shape)

    def small(self) -> dict[str, torch.Tensor]:
        """Everything that is neither matrix nor table: norms and biases, in the dtypes they came in."""
        try:
            tensors: dict[str, torch.Tensor] = load_file(self.folder / _SMALL)
        except SafetensorError as exc:
            raise HarnessError(f"{self.folder / _SMALL} is damaged; remove its folder: it is converted again") from exc
        return tensors

    def read(
        self, chosen: Iterable[int], room: Callable[[int], torch.Tensor], keep: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Stored bytes of tiles, without leaving them in the page cache as well: read into what `room` gives for so
        many, and kept as `keep` returns them."""
        found = {}
        for i in sorted(chosen):
            tile = self.tiles[i]
            data = room(tile.nbytes)[: tile.nbytes]
            with (self.folder / tile.file).open("rb", buffering=0) as file:
                if os.preadv(file.fileno(), [cast(Any, data.numpy())], tile.offset) != tile.nbytes:
                    raise HarnessError(f"{self.folder / tile.file} ends inside {tile.matrix}; remove its folder")
                os.posix_fadvise(file.fileno(), tile.offset, tile.span, os.POSIX_FADV_DONTNEED)
            found[i] = keep(data)
        return found


def convert(
    model: LocalModel,
    source: CheckpointReader,
    matrices: Sequence[Matrix],
    tiles: Sequence[WeightTile],
    quantizers: Mapping[Storage, Quantizer],
    tables: Mapping[str, tuple[int, int]],
    small: Mapping[str, tuple[int, ...]],
    cache: Path,
    on_progress: Callable[[int, int], None],
) -> ConvertedCheckpoint:
    """The converted form of `model`, written under `cache` on first use, a tile at a time, then reused by content.

    `tiles` are those of `matrices`, in order of use, and `quantizers` make what they are stored as. Raises HarnessError
    for a checkpoint that does not fit the model or holds NaN, DiskFullError where it cannot be written.
    """
    dtype = getattr(torch, model.dtype)
    offload = cache / "offload"
    contents = [content.digest(shard, cache) for shard in source.shards]
    recipe = json.dumps([_LAYOUT, contents, model.dtype, [asdict(b) for b in tiles], list(tables), list(small)])
    folder = offload / f"{Path(model.path).name}-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    needed = sum(b.span for b in tiles) + sum(a * b for a, b in tables.values()) * dtype.itemsize

    def write(temporary: Path) -> None:
        _Writer(temporary, source, dtype, quantizers, needed, on_progress).write(matrices, tiles, tables, small)

    converted = ConvertedCheckpoint(
        build_once(folder, "converted weights", needed, write), dtype, tuple(tiles), dict(tables)
    )
    converted.check()
    return converted


class _Writer:
    """Writes one converted checkpoint into an empty folder."""

    def __init__(
        self,
        folder: Path,
        source: CheckpointReader,
        dtype: torch.dtype,
        quantizers: Mapping[Storage, Quantizer],
        total: int,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._folder = folder
        self._source = source
        self._dtype = dtype
        self._quantizers = quantizers
        self._total = total
        self._on_progress = on_progress
        self._done = 0

    def write(
        self,
        matrices: Sequence[Matrix],
        tiles: Sequence[WeightTile],
        tables: Mapping[str, tuple[int, int]],
        small: Mapping[str, tuple[int, ...]],
    ) -> None:
        by_name = {m.name: m for m in matrices}
        for tile in tiles:
            self._append(tile.file, self._read(by_name[tile.matrix], tile), tile.span)
        for name, shape in tables.items():
            view = self._source.view(name, shape)
            step = max(1, _PIECE // (shape[1] * self._dtype.itemsize))
            for row in range(0, shape[0], step):
                self._append(_table_file(name), _stored(name, view[row : row + step], self._dtype))
        # in their own dtype: norms are often kept in more bits than matrices
        tensors = {name: self._source.whole(name, shape) for name, shape in small.items()}
        for name, tensor in tensors.items():
            _stored(name, tensor, tensor.dtype)
        shards.save(tensors, self._folder / _SMALL)

    def _read(self, matrix: Matrix, tile: WeightTile) -> torch.Tensor:
        """One tile from the checkpoint, as it will lie in the file."""
        cut, whole = slice(tile.start, tile.stop), slice(0, tile.shape[1 - tile.axis])
        rows, columns = (cut, whole) if tile.axis == 0 else (whole, cut)
        if matrix.transposed:
            shape = (matrix.columns, matrix.rows)
            part = self._source.read(matrix.parameter, matrix.expert, shape, columns, rows).T
        else:
            part = self._source.read(matrix.parameter, matrix.expert, (matrix.rows, matrix.columns), rows, columns)
        if isinstance(tile.stored, Plain):
            return _stored(matrix.name, part, self._dtype)
        part = _stored(matrix.name, part, part.dtype)
        return self._quantizers[tile.stored].pack(part.T if tile.stored.across else part)

    def _append(self, name: str, tensor: torch.Tensor, span: int | None = None) -> None:
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        data += bytes((span or len(data)) - len(data))
        with (self._folder / name).open("ab") as file:
            file.write(data)
        self._done += len(data)
        self._on_progress(self._done, self._total)


def _table_file(name: str) -> str:
    return f"{name}.table"


def _stored(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A part of a parameter in the checkpoint's dtype. Raises HarnessError for NaN and infinity, or what becomes so."""
    if not torch.isfinite(tensor).all():
        raise HarnessError(f"the checkpoint holds NaN or infinity in {name}; it is damaged or was trained to nothing")
    stored = tensor.to(dtype)
    if stored.dtype != tensor.dtype and not torch.isfinite(stored).all():
        raise HarnessError(f"{name} has values that {dtype}, in which most of the checkpoint is, cannot hold")
    return stored
