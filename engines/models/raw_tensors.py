"""Reads a checkpoint's tensors one at a time as numpy arrays, without torch, for engines with their own file format."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.models.checkpoints import read_shard, shard_names

#: numpy has no bfloat16, so we read its bits.
_STORED: Mapping[str, Any] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_CHUNK_VALUES = 4 << 20


@dataclass(frozen=True)
class RawTensor:
    """A tensor in a safetensors file: its dtype's name in the format, its shape, and the offset of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int

    def bits(self) -> npt.NDArray[Any]:
        """The values as stored, in `shape`; bfloat16 as uint16, the upper halves of float32."""
        flat = np.fromfile(self.file, _STORED[self.dtype], math.prod(self.shape), offset=self.offset)
        return flat.reshape(self.shape)

    def pieces(self) -> Iterator[npt.NDArray[Any]]:
        """The values of `bits`, flat and in chunks of some MiB, for tensors that may not fit in memory."""
        stored, left, offset = _STORED[self.dtype], math.prod(self.shape), self.offset
        while left:
            chunk = np.fromfile(self.file, stored, min(left, _CHUNK_VALUES), offset=offset)
            left, offset = left - len(chunk), offset + chunk.nbytes
            yield chunk


def values(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Stored `bits` as floats; bfloat16 becomes float32 without loss."""
    return (bits.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else bits


def read(folder: Path) -> Iterator[RawTensor]:
    """Yields all tensors of a folder of safetensors in file order; `prepare` must have verified the checkpoint."""
    for name in shard_names(folder):
        header = read_shard(folder / name).header
        for tensor, entry in json.loads(header).items():
            if tensor != "__metadata__":
                offset = 8 + len(header) + entry["data_offsets"][0]
                yield RawTensor(tensor, entry["dtype"], tuple(entry["shape"]), folder / name, offset)
