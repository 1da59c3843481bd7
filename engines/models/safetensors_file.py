"""Reads checkpoints of safetensors without torch: their files, verified headers, and tensors as numpy arrays."""

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.api import HarnessError
from harness.common.regular_file import open_regular, parse_json, read_json

_MAX_HEADER_BYTES = 100_000_000  # the limit of the format
#: numpy has no bfloat16, so we read its bits.
_STORED: Mapping[str, Any] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
#: Bytes of a value, by the dtype's name.
_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8, "F8_E8M0": 1,
}  # fmt: skip
#: Dtypes of less than a byte.
_SMALLER = ("F6_E2M3", "F6_E3M2", "F4")
_CHUNK_VALUES = 4 << 20


@dataclass(frozen=True)
class RawTensor:
    """A tensor in a file: its dtype's name in the format, its shape, and its bytes' offset and number."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def bits(self) -> npt.NDArray[Any]:
        """The values as stored, in `shape`; bfloat16 as uint16, the upper halves of float32."""
        flat = np.fromfile(self.file, _STORED[self.dtype], math.prod(self.shape), offset=self.offset)
        return flat.reshape(self.shape)

    def mapped(self) -> npt.NDArray[Any]:
        """The values of `bits`, mapped: read page by page where they are used."""
        return np.memmap(self.file, _STORED[self.dtype], "r", self.offset, self.shape)

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


@dataclass(frozen=True)
class Shard:
    """A file: its size, its header in JSON, and its tensors in order."""

    path: Path
    size: int
    header: bytes
    tensors: tuple[RawTensor, ...]


def read_shards(folder: Path) -> list[Shard]:
    """Reads the headers of a checkpoint. Raises HarnessError for files that are missing, damaged or truncated."""
    return [_read_shard(path) for path in shard_paths(folder)]


def shard_paths(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises HarnessError where it has none, or its index is invalid."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        weight_map = json_object(index).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        # the index is untrusted: its names must stay inside the folder
        if not names or any(not isinstance(n, str) or not n.isprintable() or Path(n).name != n for n in names):
            raise HarnessError(f"{index}: weight_map names no shards, or files outside the folder")
        if single.is_file() and single.name not in names:
            raise HarnessError(f"{folder} holds two checkpoints, {single.name} and the shards of {index.name}; "
                               "libraries take one or the other: remove one")  # fmt: skip
        return [folder / name for name in sorted(set(names))]
    if single.is_file():
        return [single]
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickled:
        raise HarnessError(
            f"{folder} holds only pickled weights ({pickled[0]}), which can run code when loaded; "
            "set model.weights: pickle to read their tensors and refuse anything else"
        )
    raise HarnessError(
        f"{folder} has no model.safetensors and no model.safetensors.index.json; "
        "if its weights are pickled (pytorch_model.bin), set model.weights: pickle"
    )


def json_object(path: Path) -> dict[str, Any]:
    """A JSON file of a model folder. Raises HarnessError for one that is missing or is not an object."""
    try:
        data = read_json(path)
    except FileNotFoundError:
        raise HarnessError(f"{path} is missing: not a model folder") from None
    except OSError as exc:
        raise HarnessError(f"{path} cannot be read: {exc.strerror or exc}") from None
    except ValueError as exc:
        raise HarnessError(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise HarnessError(f"{path} is not a JSON object")
    return data


def _read_shard(path: Path) -> Shard:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else _MAX_HEADER_BYTES
            header = file.read(length) if length < min(size, _MAX_HEADER_BYTES) else b""
        start = 8 + length
        entries = {name: entry for name, entry in parse_json(header).items() if name != "__metadata__"}
        tensors = [_tensor(name, entry, path, start) for name, entry in entries.items()]
    except FileNotFoundError:
        raise HarnessError(f"{path} is missing: its index names it") from None
    except OSError as exc:
        raise HarnessError(f"{path} cannot be read: {exc.strerror or exc}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise HarnessError(f"{path} is not a safetensors file: its header does not parse ({size} bytes)") from exc
    expected = start  # the format has neither holes nor overlaps
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != expected:
            raise HarnessError(f"{path} is damaged: {tensor.name} begins at {tensor.offset}, not at {expected}")
        expected += tensor.nbytes
    if size != expected:
        raise HarnessError(f"{path} is truncated or damaged: expected {expected} bytes, found {size}")
    return Shard(path, size, header, tuple(tensors))


def _tensor(name: str, entry: Any, path: Path, start: int) -> RawTensor:
    """A header's entry. Raises ValueError, KeyError or TypeError where it is none."""
    begin, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if dtype not in _BYTES and dtype not in _SMALLER:
        raise ValueError(f"{name} has the unknown dtype {dtype}")
    if any(type(number) is not int or number < 0 for number in (begin, end, *shape)):
        raise ValueError(f"{name} has a size that is no whole number")
    if dtype in _BYTES and end - begin != math.prod(shape) * _BYTES[dtype]:
        raise ValueError(f"{name} has {end - begin} bytes for its shape {shape}")
    return RawTensor(name, dtype, shape, path, start + begin, end - begin)
