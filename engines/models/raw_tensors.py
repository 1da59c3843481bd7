"""A checkpoint's tensors one at a time as numpy arrays, without torch: for engines that want them in another format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.models.checkpoints import read_shard, shard_names

#: numpy has no bfloat16: its bits.
_STORED: Mapping[str, Any] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
#: Values read at once.
_PIECE = 4 << 20


@dataclass(frozen=True)
class RawTensor:
    """One tensor in a file: safetensors' name of its dtype, its shape, and where its bytes begin."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int

    def bits(self) -> npt.NDArray[Any]:
        """The values as they are stored; of bfloat16 the upper halves of float32 as uint16."""
        flat = np.fromfile(self.file, _STORED[self.dtype], math.prod(self.shape), offset=self.offset)
        return flat.reshape(self.shape)

    def pieces(self) -> Iterator[npt.NDArray[Any]]:
        """The same, flat and a piece of some MiB after the other: for tensors of which a copy may not fit in memory."""
        stored, left, offset = _STORED[self.dtype], math.prod(self.shape), self.offset
        while left:
            piece = np.fromfile(self.file, stored, min(left, _PIECE), offset=offset)
            left, offset = left - len(piece), offset + piece.nbytes
            yield piece


def values(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """What is stored, as floats; bfloat16 exactly as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else bits


def read(folder: Path) -> Iterator[RawTensor]:
    """All tensors of a folder of safetensors, in the order of its files. The checkpoint has been checked before."""
    for name in shard_names(folder):
        header = read_shard(folder / name).header
        for tensor, entry in json.loads(header).items():
            if tensor != "__metadata__":
                offset = 8 + len(header) + entry["data_offsets"][0]
                yield RawTensor(tensor, entry["dtype"], tuple(entry["shape"]), folder / name, offset)
