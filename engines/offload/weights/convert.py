"""Converts a checkpoint into aligned files, tiles in the order of use; later loads of the same content share them."""

import hashlib
import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engines.common.folders import build_once
from engines.models import file_digest as content
from engines.models import shards
from engines.offload.kernels import WeightPack, panels
from engines.offload.memory.layout import Matrix, WeightTile, aligned, stored_as
from engines.offload.memory.storage import Grouped, Panels, Plain, WeightStorage
from engines.offload.weights import manifest
from engines.offload.weights.checkpoint_reader import CheckpointReader
from harness.api import HarnessError, LocalModel
from harness.common.regular_file import read_json

_LAYOUT, _QUANTIZER = manifest.LAYOUT, manifest.QUANTIZER
_SMALL = "small.safetensors"
#: Lists the tiles that could not be packed.
_PLAIN = "plain.json"
_PIECE = 4 << 20
_REMOVE = "remove its folder, and the checkpoint will be converted again"


@dataclass(frozen=True)
class CheckpointLayout:
    """What is converted: `matrices`, cut into `tiles` in the order of use, and by their shapes embedding `tables` and
    all other tensors, which are `small`."""

    matrices: Sequence[Matrix]
    tiles: Sequence[WeightTile]
    tables: Mapping[str, tuple[int, int]]
    small: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """A converted checkpoint's folder: its tiles in the order of use, read by TileReader, and tensors read by name.

    A tile that twelve bits cannot hold is plain. `note` names a folder of the same checkpoint that an earlier quantizer
    wrote, or is empty.
    """

    folder: Path
    dtype: torch.dtype
    tiles: Sequence[WeightTile]
    tables: Mapping[str, tuple[int, int]]
    note: str = ""

    def check(self) -> None:
        """Raises HarnessError for a file that is missing or was truncated since it was written."""
        sizes = {tile.file: 0 for tile in self.tiles} | {_SMALL: 1}
        for tile in self.tiles:
            sizes[tile.file] = max(sizes[tile.file], tile.offset + tile.span)
        for name, size in (sizes | self._table_sizes()).items():
            self._require(name, size)

    def check_tables(self) -> None:
        """Raises HarnessError for a table that was cut: reading a mapped file beyond its end ends the process by
        SIGBUS. One that was removed stays mapped as it was."""
        for name, size in self._table_sizes().items():
            if (self.folder / name).exists():
                self._require(name, size)

    def _table_sizes(self) -> dict[str, int]:
        return {_table_file(name): a * b * self.dtype.itemsize for name, (a, b) in self.tables.items()}

    def _require(self, name: str, size: int) -> None:
        path = self.folder / name
        actual = path.stat().st_size if path.exists() else 0
        if actual < size:
            raise HarnessError(f"{path} has {actual} of {size} bytes; {_REMOVE}")

    def table(self, name: str) -> torch.Tensor:
        """An embedding table [entries, width], mapped without read-ahead: a lookup reads the rows it needs."""
        shape = self.tables[name]
        with (self.folder / _table_file(name)).open("rb") as file:
            # a private mapping, because torch wants writable memory; it is never written
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapped.madvise(mmap.MADV_RANDOM)
        return torch.frombuffer(mapped, dtype=self.dtype, count=shape[0] * shape[1]).view(shape)

    def small(self) -> dict[str, torch.Tensor]:
        """All tensors that are neither matrix nor table, such as norms and biases, in the checkpoint's dtypes."""
        try:
            # copies: a mapped file that is cut while the model runs would end the process by SIGBUS
            return {name: tensor.clone() for name, tensor in load_file(self.folder / _SMALL).items()}
        except SafetensorError as exc:
            raise HarnessError(f"{self.folder / _SMALL} is damaged; {_REMOVE}") from exc


def convert(
    model: LocalModel, source: CheckpointReader, layout: CheckpointLayout, packers: Mapping[WeightStorage, WeightPack],
    cache: Path, on_progress: Callable[[int, int], None],
) -> ConvertedCheckpoint:  # fmt: skip
    """Converts `model` into a folder under `cache`, tile by tile, unless one of the same content and layout is there.

    `packers` pack tiles that are not plain. Raises HarnessError for a checkpoint that does not fit the model or holds
    NaN, DiskFullError where it cannot be written.
    """
    dtype, needed = getattr(torch, model.dtype), _tile_and_table_bytes(model, layout)
    folder_of = _folders(model, source, layout, cache)

    def write(folder: Path) -> None:
        done, plain = 0, list[int]()
        for name, data in _pieces(source, layout, dtype, packers, plain):
            with (folder / name).open("ab") as file:
                file.write(data)
            done += len(data)
            on_progress(done, needed)
        # in the checkpoint's dtype: norms often have more bits than matrices
        tensors = {name: source.whole(name, shape) for name, shape in layout.small.items()}
        for name, tensor in tensors.items():
            _stored(name, tensor, tensor.dtype)
        shards.save(tensors, folder / _SMALL)
        (folder / _PLAIN).write_text(json.dumps(plain))
        manifest.write(folder, _LAYOUT, _QUANTIZER if any(map(_is_quantized, layout.tiles)) else None)

    folder = build_once(folder_of(_QUANTIZER), "converted weights", needed, write)
    stale = [old for old in map(folder_of, range(1, _QUANTIZER)) if old != folder and old.is_dir()]
    note = f"the weights were quantized again, with a smaller error; nothing reads {stale[0]} any more" if stale else ""
    plain = dict.fromkeys(_plain_tiles(folder), Panels())
    converted = ConvertedCheckpoint(folder, dtype, stored_as(layout.tiles, plain), layout.tables, note)
    converted.check()
    return converted


def unwritten_bytes(model: LocalModel, source: CheckpointReader, layout: CheckpointLayout, cache: Path) -> int:
    """Bytes that `convert` will write to disk: 0 where its folder is there. Small tensors are taken to be float32, a
    little too much for those that are not."""
    if _folders(model, source, layout, cache)(_QUANTIZER).is_dir():
        return 0
    small = sum(math.prod(shape) for shape in layout.small.values())
    return _tile_and_table_bytes(model, layout) + small * torch.float32.itemsize


def _tile_and_table_bytes(model: LocalModel, layout: CheckpointLayout) -> int:
    dtype: torch.dtype = getattr(torch, model.dtype)
    tables = sum(entries * width for entries, width in layout.tables.values())
    return sum(tile.span for tile in layout.tiles) + tables * dtype.itemsize


def _folders(
    model: LocalModel, source: CheckpointReader, layout: CheckpointLayout, cache: Path
) -> Callable[[int], Path]:
    """The folder of the converted checkpoint by the number of its quantizer."""
    contents = [content.digest(shard, cache) for shard in source.shards]
    tables, small, parts = list(layout.tables), list(layout.small), parts_of(layout.matrices)

    def folder_of(quantizer: int) -> Path:
        key = folder_key(contents, model.dtype, layout.tiles, tables, small, quantizer, parts)
        return cache / "offload" / f"{Path(model.path).name}-{key}"

    return folder_of


def folder_key(
    contents: Sequence[str], dtype: str, tiles: Sequence[WeightTile], tables: Sequence[str], small: Sequence[str],
    quantizer: int = _QUANTIZER, parts: Sequence[Any] = (),
) -> str:  # fmt: skip
    """Names what a folder holds: the checkpoint's digests, the layout, where tiles are quantized the quantizer, and
    where matrices are parts which.

    The fields are spelled out here, because renaming one of WeightTile's would make every folder be converted again.
    """

    def storage(stored: WeightStorage) -> dict[str, Any]:
        if isinstance(stored, Plain):
            return {"dtype": stored.dtype}
        if isinstance(stored, Panels):
            inside: WeightStorage = Plain("bfloat16") if stored.grouped is None else stored.grouped
            return {"panel": stored.grain, **storage(inside)} | ({"bits": 12} if stored.exact12 else {})
        known = {"bits": stored.bits, "group": stored.group, "across": stored.group_axis == 0}
        return known if quantizer == 1 else known | {"quantizer": quantizer}

    layout = [
        {"matrix": t.matrix, "axis": t.axis, "start": t.start, "stop": t.stop, "shape": t.shape, "file": t.file,
         "offset": t.offset, "nbytes": t.nbytes, "stored": storage(t.stored)} for t in tiles
    ]  # fmt: skip
    recipe = json.dumps([_LAYOUT, contents, dtype, layout, tables, small, *parts])
    return hashlib.sha256(recipe.encode()).hexdigest()[:16]


def parts_of(matrices: Sequence[Matrix]) -> list[Any]:
    """Of each matrix that is a part of the checkpoint's, which part."""
    return [[m.name, m.whole, m.start] for m in matrices if m.whole is not None]


def _is_quantized(tile: WeightTile) -> bool:
    stored = tile.stored.grouped if isinstance(tile.stored, Panels) else tile.stored
    return isinstance(stored, Grouped)


def _pieces(
    source: CheckpointReader, layout: CheckpointLayout, dtype: torch.dtype, packers: Mapping[WeightStorage, WeightPack],
    plain: list[int],
) -> Iterator[tuple[str, bytes | memoryview]]:  # fmt: skip
    """What to append to the files of tiles and tables, in this order: (file, bytes). Appends to `plain` the indices of
    tiles that could not be packed."""
    matrices = {matrix.name: matrix for matrix in layout.matrices}
    for tile in layout.tiles:
        part, stored = _read(source, matrices[tile.matrix], tile), tile.stored
        exact = isinstance(stored, Plain) or (isinstance(stored, Panels) and stored.grouped is None)
        values = _stored(tile.matrix, part, dtype if exact else part.dtype)
        packed: torch.Tensor | None = values
        if not isinstance(stored, Plain):
            packed = packers[stored](values.T if isinstance(stored, Grouped) and stored.group_axis == 0 else values)
        if packed is None:
            plain.append(tile.index)
            packed = panels.pack(values)
        data = _bytes(packed)
        yield tile.file, data
        yield tile.file, bytes(aligned(len(data)) - len(data))
    for name, shape in layout.tables.items():
        view = source.view(name, shape)
        rows = max(1, _PIECE // (shape[1] * dtype.itemsize))
        for row in range(0, shape[0], rows):
            yield _table_file(name), _bytes(_stored(name, view[row : row + rows], dtype))


def _read(source: CheckpointReader, matrix: Matrix, tile: WeightTile) -> torch.Tensor:
    """One tile's values, as the checkpoint has them."""
    cut, whole = slice(tile.start, tile.stop), slice(0, tile.shape[1 - tile.axis])
    rows, columns = (cut, whole) if tile.axis == 0 else (whole, cut)
    rows, columns = _shifted(rows, matrix.start[0]), _shifted(columns, matrix.start[1])
    shape = matrix.whole or (matrix.rows, matrix.columns)
    if matrix.transposed:
        return source.read(matrix.parameter, matrix.expert, shape[::-1], columns, rows).T
    return source.read(matrix.parameter, matrix.expert, shape, rows, columns)


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).flatten().numpy().data


def _plain_tiles(folder: Path) -> list[int]:
    """Indices of the tiles that could not be packed. Raises HarnessError for a damaged list."""
    path = folder / _PLAIN
    if not path.exists():  # converted before there was such a list
        return []
    try:
        return [int(index) for index in read_json(path)]
    except (ValueError, TypeError) as exc:
        raise HarnessError(f"{path} is damaged; {_REMOVE}") from exc


def _table_file(name: str) -> str:
    return f"{name}.table"


def _stored(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A part of a parameter cast to `dtype`. Raises HarnessError for NaN and infinity, before the cast or after."""
    if not _is_finite(tensor):
        raise HarnessError(f"the checkpoint holds NaN or infinity in {name}; the file is damaged, or training diverged")
    stored = tensor.to(dtype)
    if stored.dtype != tensor.dtype and not _is_finite(stored):
        raise HarnessError(f"{name} has values outside the range of {dtype}, the dtype of most of the checkpoint")
    return stored


def _is_finite(tensor: torch.Tensor) -> bool:
    """By the least and the largest, which are NaN where a value is: 30 times as fast as to look at each value."""
    return not tensor.numel() or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())
