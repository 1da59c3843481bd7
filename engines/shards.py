"""Writes a checkpoint that came in another format as safetensors, a part at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def write(folder: Path, parts: Iterable[Mapping[str, torch.Tensor]], on_bytes: Callable[[int], None]) -> None:
    """A shard for each of `parts`, which is one at a time in memory, and their index, into an empty folder.

    `on_bytes` gets the bytes written so far. Raises OSError as the disk does.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in part.items()}, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
        total += sum(tensor.nbytes for tensor in part.values())
        on_bytes(total)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))
