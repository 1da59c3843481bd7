"""A checkpoint converted once into aligned files in the order of use, shared by all who run the model."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engines.folders import build_once
from engines.offload.layout import Block, Matrix, blocks_of
from harness.api import DTYPE_BYTES, HarnessError, LocalModel

#: Part of a folder's name: raise it when the files of the same checkpoint are laid out differently.
LAYOUT = 1
_MANIFEST = "manifest.json"
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Converted:
    """A converted checkpoint: where its blocks are, in order of use. Tables and small tensors are read by name."""

    folder: Path
    dtype: torch.dtype
    blocks: tuple[Block, ...]
    tables: Mapping[str, tuple[int, int]]

    def table(self, name: str) -> torch.Tensor:
        """An embedding [entries, width] mapped from its file without read-ahead: a lookup reads the rows it needs."""
        shape = self.tables[name]
        with (self.folder / f"{name}.table").open("rb") as file:
            # a private mapping, because torch wants to be able to write; nobody does
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapped.madvise(mmap.MADV_RANDOM)
        return torch.frombuffer(mapped, dtype=self.dtype, count=shape[0] * shape[1]).view(shape)

    def small(self) -> dict[str, torch.Tensor]:
        """Everything that is neither matrix nor table: norms and biases, in the stored dtype."""
        with safe_open(self.folder / "small.safetensors", framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


class Source:
    """The tensors of a folder of safetensors under the names that the model's parameters have.

    `aliases` gives the name of the checkpoint's tensor for a tied parameter; `prefix` is the base model's, which
    checkpoints of the bare model lack. Raises HarnessError for a tensor that is not there or has another shape.
    """

    def __init__(self, model: LocalModel, prefix: str, aliases: Mapping[str, str]) -> None:
        self._folder = Path(model.path)
        self._prefix = f"{prefix}."
        self._aliases = aliases
        self._files: dict[str, Any] = {}
        index = self._folder / "model.safetensors.index.json"
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else None
        for name in names or ["model.safetensors"]:
            file = safe_open(self._folder / name, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]

    def slice(self, parameter: str, shape: tuple[int, ...]) -> Any:
        """A lazy view of a tensor: indexing reads that part only."""
        found = self._files.get(key := self._key(parameter))
        if found is None:
            raise HarnessError(f"{self._folder} holds no tensor for {parameter}; is it a checkpoint of this model?")
        view = found.get_slice(key)
        if tuple(view.get_shape()) != shape:
            got = list(view.get_shape())
            raise HarnessError(f"{self._folder}: tensor {key} has shape {got}, the model needs {list(shape)}")
        return view

    def samples(self) -> Iterator[bytes]:
        """The first, middle and last bytes of every tensor: another training step changes them."""
        for name in sorted(self._files):
            view = self._files[name].get_slice(name)
            rows = view.get_shape()[0] if view.get_shape() else 0
            for row in sorted({0, rows // 2, max(0, rows - 1)}) if rows else ():
                part = view[row : row + 1].reshape(-1)[:_SAMPLE_BYTES].contiguous()
                yield name.encode() + part.view(torch.uint8).numpy().tobytes()

    def _key(self, parameter: str) -> str:
        name = self._aliases.get(parameter, parameter)
        candidates = (parameter, name, name.removeprefix(self._prefix), self._prefix + name)
        return next((c for c in candidates if c in self._files), parameter)


def convert(
    model: LocalModel,
    source: Source,
    matrices: Sequence[Matrix],
    tables: Mapping[str, tuple[int, int]],
    small: Mapping[str, tuple[int, ...]],
    cache: Path,
    on_progress: Callable[[int, int], None],
) -> Converted:
    """The converted form of `model`, written under `cache` on first use, a block at a time, then reused by content.

    `matrices` are in order of use. Raises HarnessError for a checkpoint that does not fit the model, DiskFullError
    where it cannot be written.
    """
    dtype = getattr(torch, model.dtype)
    blocks = blocks_of(matrices, DTYPE_BYTES[model.dtype])
    digest = hashlib.sha256(json.dumps([LAYOUT, model.digest, model.dtype, [asdict(m) for m in matrices]]).encode())
    for sample in source.samples():
        digest.update(sample)
    folder = cache / "offload" / f"{Path(model.path).name}-{digest.hexdigest()[:16]}"
    needed = sum(b.span for b in blocks) + sum(a * b for a, b in tables.values()) * dtype.itemsize

    def write(temporary: Path) -> None:
        _Writer(temporary, source, dtype, needed, on_progress).write(matrices, blocks, tables, small)

    return Converted(build_once(folder, "converted weights", needed, write), dtype, tuple(blocks), dict(tables))


class _Writer:
    """Writes one converted checkpoint into an empty folder."""

    def __init__(
        self, folder: Path, source: Source, dtype: torch.dtype, total: int, on_progress: Callable[[int, int], None]
    ) -> None:
        self._folder = folder
        self._source = source
        self._dtype = dtype
        self._total = total
        self._on_progress = on_progress
        self._done = 0
        self._hashes: dict[str, Any] = {}

    def write(
        self,
        matrices: Sequence[Matrix],
        blocks: Sequence[Block],
        tables: Mapping[str, tuple[int, int]],
        small: Mapping[str, tuple[int, ...]],
    ) -> None:
        by_name = {m.name: m for m in matrices}
        for block in blocks:
            self._append(block.file, self._read(by_name[block.matrix], block), block.span)
        for name, shape in tables.items():
            view = self._source.slice(name, shape)
            step = max(1, (4 << 20) // (shape[1] * self._dtype.itemsize))
            for row in range(0, shape[0], step):
                self._append(f"{name}.table", _finite(name, view[row : row + step]).to(self._dtype))
        self._write_small(small)
        manifest = {"layout": LAYOUT, "sha256": {name: h.hexdigest() for name, h in self._hashes.items()}}
        (self._folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in [*self._folder.iterdir(), self._folder]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def _read(self, matrix: Matrix, block: Block) -> torch.Tensor:
        """One block from the checkpoint, as it will lie in the file."""
        shape = (matrix.columns, matrix.rows) if matrix.transposed else (matrix.rows, matrix.columns)
        view = self._source.slice(matrix.name, shape)
        first = (block.axis == 0) != matrix.transposed
        part = view[block.start : block.stop] if first else view[:, block.start : block.stop]
        return _finite(matrix.name, part.T if matrix.transposed else part).to(self._dtype)

    def _append(self, name: str, tensor: torch.Tensor, span: int | None = None) -> None:
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        data += bytes((span or len(data)) - len(data))
        with (self._folder / name).open("ab") as file:
            file.write(data)
        self._hashes.setdefault(name, hashlib.sha256()).update(data)
        self._done += len(data)
        self._on_progress(self._done, self._total)

    def _write_small(self, small: Mapping[str, tuple[int, ...]]) -> None:
        # in their own dtype: norms are often kept in more bits than matrices
        tensors = {name: _finite(name, self._source.slice(name, shape)[:].clone()) for name, shape in small.items()}
        save_file(tensors, self._folder / "small.safetensors")


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(tensor).all():
        raise HarnessError(f"the checkpoint holds NaN or infinity in {name}; it is damaged or was trained to nothing")
    return tensor
