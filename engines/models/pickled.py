"""Converts pickled weights into a folder of safetensors: once, shard by shard, and only with `weights: pickle`."""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from engines.common.folders import build_once
from engines.models import file_digest, shards
from harness.api import HarnessError
from harness.common.regular_file import read_json

_METADATA_SUFFIXES = (".json", ".txt", ".model", ".jinja")
_INDEX = "pytorch_model.bin.index.json"
#: Part of the folder's name: raise it when the same files are converted differently.
_RECIPE = 1
_SHARD_BYTES = 1 << 30


def to_folder(folder: Path, cache: Path, on_progress: Callable[[int, int], None]) -> Path:
    """Converts a folder of `pytorch_model*.bin` with its metadata files; returns the converted folder.

    torch reads the files with `weights_only`, which builds tensors and refuses any other object of a pickle. Raises
    HarnessError for a file that is missing, damaged, or holds more than tensors.
    """
    files = _files(folder)
    metadata = sorted(
        f for f in folder.iterdir() if f.suffix in _METADATA_SUFFIXES and not f.name.endswith(".index.json")
    )
    digests = f"{_RECIPE}" + "".join(file_digest.digest(file, cache) for file in [*files, *metadata])
    target = cache / "models" / f"{folder.name}-unpickled-{hashlib.sha256(digests.encode()).hexdigest()[:12]}"
    needed = sum(file.stat().st_size for file in files)

    def write(temporary: Path) -> None:
        shards.write(temporary, _shards(files), lambda done: on_progress(min(done, needed), needed))
        for file in metadata:
            shutil.copy(file, temporary)

    return build_once(target, "pickled weights as safetensors", needed, write)


def _files(folder: Path) -> list[Path]:
    if not (folder / _INDEX).is_file():
        if (unsharded := folder / "pytorch_model.bin").is_file():
            return [unsharded]
        raise HarnessError(
            f"{folder} holds no pickled weights (pytorch_model.bin, {_INDEX}); leave weights: pickle out"
        )
    try:
        names = sorted(set(read_json(folder / _INDEX)["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise HarnessError(f"{folder / _INDEX} is not a weight index: {exc}") from exc
    for name in names:  # the index is untrusted: its names must stay inside the folder
        if not isinstance(name, str) or "\0" in name or Path(name).name != name or not (folder / name).is_file():
            raise HarnessError(f"{folder / name} is missing: its index names it")
    return [folder / name for name in names]


def _shards(files: Sequence[Path]) -> Iterator[dict[str, torch.Tensor]]:
    """Yields all tensors in shards of at most 1 GiB; of tied tensors of a file only the first name."""
    for file in files:
        shard: dict[str, torch.Tensor] = {}
        seen: set[tuple[object, ...]] = set()
        for name, tensor in _load(file).items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise HarnessError(f"{file} is not a plain state dict: it holds {name!r}, a {type(tensor).__name__}")
            view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if view in seen:
                continue
            seen.add(view)
            if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > _SHARD_BYTES:
                yield shard
                shard = {}
            # safetensors refuses tensors that share memory, such as slices of a fused matrix
            shard[name] = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        yield shard


def _load(file: Path) -> Mapping[str, torch.Tensor]:
    """Loads a file memory-mapped, or whole for a file from before torch 1.6."""
    try:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as exc:  # torch, zipfile and pickle raise anything, bare Exception included
        # without torch's message, which advises to allow code execution
        raise HarnessError(
            f"{file} is damaged, or holds more than tensors and is refused ({type(exc).__name__})"
        ) from exc
    if not isinstance(loaded, Mapping):
        raise HarnessError(f"{file} is not a plain state dict but a {type(loaded).__name__}")
    return loaded
