"""Writes a random checkpoint of a published shape tensor by tensor, in about 200 MB of memory for any size.

The values are the same on every machine: integer noise from a PCG64 stream, scaled and rounded once. One block of noise
is tiled over all tensors, each from an offset that depends on its name. The block's length is prime, so no two rows of
a matrix are equal (equal embeddings would tie in greedy decoding).
"""

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.api import DTYPE_BYTES

SEED = 0
#: Part of the folder's name: raise it when the same id, dtype and seed give different bytes.
RECIPE = 1
SHARD_BYTES = 1 << 30
SAFETENSORS_DTYPE: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_BLOCK = 16777213  # the largest prime below 2**24
_STD = 0.02  # initialisation of OPT (Zhang et al. 2022, section 2.2), also used for LLaMA
_RESIDUAL = ("out_proj.weight", "fc2.weight", "o_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class Tensor:
    """A tensor of the checkpoint to write."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Plan:
    """The layout of a checkpoint: its tensors in file order, sharded, and the texts of its configuration files."""

    dtype: str
    shards: tuple[tuple[Tensor, ...], ...]
    num_layers: int
    config: str
    generation_config: str

    @property
    def total_bytes(self) -> int:
        return sum(t.numel for shard in self.shards for t in shard) * DTYPE_BYTES[self.dtype]


def plan(config_kwargs: Mapping[str, Any], dtype: str) -> Plan:
    """Lays out a checkpoint with the tensors that transformers' model of this configuration would save."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from engines.common.meta_device import NothingDrawn

    config = AutoConfig.for_model(**config_kwargs)
    with torch.device("meta"), NothingDrawn():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    # named_parameters yields a tied tensor once, as a checkpoint holds it
    tensors = [Tensor(name, tuple(p.shape)) for name, p in model.named_parameters()]
    return Plan(
        dtype=dtype,
        shards=tuple(_shards(tensors, SHARD_BYTES // DTYPE_BYTES[dtype])),
        num_layers=config.num_hidden_layers,
        config=config.to_json_string(use_diff=False),
        generation_config=model.generation_config.to_json_string(),
    )


def write(plan: Plan, on_progress: Callable[[int, int], None], folder: Path) -> None:
    """Writes `plan` into the empty `folder`.

    `on_progress` gets (bytes written, total bytes). Holds about 200 MB. Raises OSError as the disk does.
    """
    noise = _Noise(plan)
    done, weight_map = 0, {}
    for number, shard in enumerate(plan.shards, 1):
        name = f"model-{number:05d}-of-{len(plan.shards):05d}.safetensors"
        with (folder / name).open("wb") as file:
            file.write(_header(shard, plan.dtype))
            for tensor in shard:
                for piece in noise.pieces(tensor):
                    file.write(piece)
                    done += piece.nbytes
                    on_progress(done, plan.total_bytes)
                weight_map[tensor.name] = name
    index = {"metadata": {"total_size": plan.total_bytes}, "weight_map": weight_map}
    for name, text in (
        ("model.safetensors.index.json", json.dumps(index, indent=1)),
        ("generation_config.json", plan.generation_config),
        ("config.json", plan.config),
    ):
        (folder / name).write_text(text, encoding="utf-8")


class _Noise:
    """Yields the bytes of any tensor from two blocks of noise: plain, and scaled for residual outputs."""

    def __init__(self, plan: Plan) -> None:
        self._dtype = plan.dtype
        raw = _integer_noise()
        self._plain = _encode(raw * _STD, plan.dtype)
        # each layer adds to the residual stream twice: keep its variance independent of depth (GPT-2, section 2.3)
        self._residual = _encode(raw * (_STD / math.sqrt(2 * plan.num_layers)), plan.dtype)

    def pieces(self, tensor: Tensor) -> Iterator[memoryview]:
        """The tensor's bytes in order. One-dimensional weights are norms (ones), biases are zero."""
        if len(tensor.shape) == 1:
            value = 0.0 if tensor.name.endswith("bias") else 1.0
            yield _encode(np.full(tensor.numel, value), self._dtype).data.cast("B")
            return
        block = self._residual if tensor.name.endswith(_RESIDUAL) else self._plain
        digest = hashlib.sha256(f"{SEED}:{tensor.name}".encode()).digest()
        start, left = int.from_bytes(digest[:8], "little") % _BLOCK, tensor.numel
        while left:
            piece = block[start : start + left]
            yield piece.data.cast("B")
            start, left = 0, left - len(piece)


def _integer_noise() -> npt.NDArray[np.float32]:
    """Near-normal noise of unit variance: sums of four 16-bit integers, the same bits on every machine."""
    stream = np.random.PCG64(SEED)
    noise = np.zeros(_BLOCK, dtype=np.float32)
    for first in range(0, _BLOCK, 1 << 20):  # in chunks, to limit the 64-bit words in memory
        chunk = noise[first : first + (1 << 20)]
        words = stream.random_raw(len(chunk))
        for shift in (0, 16, 32, 48):
            chunk += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.float32)  # exact: below 2**24
    noise -= np.float32(2 * 65535)
    noise /= np.float32(math.sqrt(4 * (65536**2 - 1) / 12))
    return noise


def _encode(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Values as stored: little-endian float32 or float16, or bfloat16 bits as uint16, rounded to even."""
    if dtype == "float16":
        return values.astype("<f2")
    full = values.astype("<f4")
    if dtype == "float32":
        return full
    bits = full.view("<u4")
    rounded: npt.NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded


def _shards(tensors: list[Tensor], limit: int) -> Iterator[tuple[Tensor, ...]]:
    """Splits tensors in order into shards of at most `limit` elements; a larger tensor gets a shard of its own."""
    shard: list[Tensor] = []
    for tensor in tensors:
        if shard and sum(t.numel for t in shard) + tensor.numel > limit:
            yield tuple(shard)
            shard = []
        shard.append(tensor)
    yield tuple(shard)


def _header(shard: tuple[Tensor, ...], dtype: str) -> bytes:
    """The safetensors header: its length as 8 little-endian bytes, then JSON padded to a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in shard:
        end = offset + tensor.numel * DTYPE_BYTES[dtype]
        entries[tensor.name] = {
            "dtype": SAFETENSORS_DTYPE[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
