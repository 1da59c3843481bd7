"""Writes tensors as sharded safetensors, one shard in memory at a time."""

import errno
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


def write(folder: Path, shards: Iterable[Mapping[str, torch.Tensor]], on_bytes: Callable[[int], None]) -> None:
    """Writes each of `shards` as a file of an empty folder, and their index.

    `on_bytes` gets the bytes written so far. Raises OSError as the disk does.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}.safetensors"
        save(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
        on_bytes(total)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))


def save(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Writes one safetensors file. Raises OSError as the disk does, recovered from safetensors' own exception."""
    try:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file, {"format": "pt"})
    except SafetensorError as exc:
        number = errno.ENOSPC if "No space left" in str(exc) else errno.EIO
        raise OSError(number, f"cannot write {file.name}: {exc}") from exc
