"""Pickled weights made into a folder of safetensors: once, a part at a time, and only for who asks."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from engines.common.folders import build_once
from engines.models import file_digest as content
from engines.models import shards
from harness.api import HarnessError

_ABOUT = (".json", ".txt", ".model", ".jinja")
_INDEX = "pytorch_model.bin.index.json"
#: Part of a folder's name: raise it when the same files are converted into something else.
_RECIPE = 1
_PART_BYTES = 1 << 30


def to_folder(folder: Path, cache: Path, on_progress: Callable[[int, int], None]) -> Path:
    """The checkpoint of a folder of `pytorch_model*.bin`, with the small files beside it.

    Read by torch with `weights_only`, which makes tensors and refuses all else that a pickle can do. Raises
    HarnessError for a file that is missing, damaged, or holds more than tensors.
    """
    files = _files(folder)
    about = sorted(f for f in folder.iterdir() if f.suffix in _ABOUT and not f.name.endswith(".index.json"))
    digests = f"{_RECIPE}" + "".join(content.digest(file, cache) for file in [*files, *about])
    target = cache / "models" / f"{folder.name}-unpickled-{hashlib.sha256(digests.encode()).hexdigest()[:12]}"
    needed = sum(file.stat().st_size for file in files)

    def write(temporary: Path) -> None:
        shards.write(temporary, _parts(files), lambda done: on_progress(min(done, needed), needed))
        for file in about:
            shutil.copy(file, temporary)

    return build_once(target, "pickled weights as safetensors", needed, write)


def _files(folder: Path) -> list[Path]:
    if not (folder / _INDEX).is_file():
        if (one := folder / "pytorch_model.bin").is_file():
            return [one]
        raise HarnessError(
            f"{folder} holds no pickled weights (pytorch_model.bin, {_INDEX}); leave weights: pickle out"
        )
    try:
        names = sorted(set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise HarnessError(f"{folder / _INDEX} is no index of weights: {exc}") from exc
    for name in names:  # they come from a file: they must stay inside the folder
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise HarnessError(f"{folder / name} is missing: its index names it")
    return [folder / name for name in names]


def _parts(files: Sequence[Path]) -> Iterator[dict[str, torch.Tensor]]:
    """All tensors, each once however many names it has in a file."""
    for file in files:
        part: dict[str, torch.Tensor] = {}
        seen: set[tuple[object, ...]] = set()
        for name, tensor in _load(file).items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise HarnessError(f"{file} is no plain table of tensors: it holds {name!r}, a {type(tensor).__name__}")
            place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if place in seen:
                continue
            seen.add(place)
            if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > _PART_BYTES:
                yield part
                part = {}
            # safetensors refuses tensors that share memory, such as the pieces of a fused matrix
            part[name] = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        yield part


def _load(file: Path) -> Mapping[str, torch.Tensor]:
    """Mapped, where torch can: files from before torch 1.6 are read whole."""
    try:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as exc:  # torch, zip and pickle each have their own, bare ones among them
        # not in torch's words, which advise to let the file run code
        raise HarnessError(
            f"{file} is damaged, or holds more than tensors, which is not read ({type(exc).__name__})"
        ) from exc
    if not isinstance(loaded, Mapping):
        raise HarnessError(f"{file} is no plain table of tensors but a {type(loaded).__name__}")
    return loaded
