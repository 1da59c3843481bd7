"""What a model's layers ask of a machine: bytes, values and operations of each half layer and of the model's ends."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.api import ModelShape, OffloadPolicy

#: Of device, host and disk.
Fractions = tuple[float, float, float]

#: Bytes of a value in the checkpoint's 16 bits, and of a group's step and least value.
VALUE_BYTES, GROUP_BYTES = 2.0, 4.0


@dataclass(frozen=True)
class Lengths:
    """A job of equal requests: prompt and generated tokens of each."""

    prompt: int
    generated: int

    @property
    def longest(self) -> int:
        """Tokens that are cached of a request at its end: the last one generated is not."""
        return self.prompt + self.generated - 1


def mean(each: Sequence[Lengths]) -> Lengths:
    """Rounded to whole tokens."""
    prompt, generated = (statistics.mean(of) for of in ([r.prompt for r in each], [r.generated for r in each]))
    return Lengths(max(1, round(prompt)), max(1, round(generated)))


@dataclass(frozen=True)
class Sublayer:
    """A piece of a model between whose matrices nothing else is loaded: half a layer, or an end.

    `params`: values of its matrices, of which there are `matrices`, taken to be of one size; `count`: how many parts
    there are; `quantized`: whether a policy's bits apply; `met`: what of it a token meets, less than all of experts. A
    pass is taken to ask for every expert: of eight, eight tokens miss few, and there are more.
    """

    name: str
    params: int
    count: int
    matrices: int
    attends: bool = False
    quantized: bool = True
    last: bool = False
    met: float = 1.0


def sublayers(shape: ModelShape) -> list[Sublayer]:
    """Attention, feed-forward and head. Embeddings are looked up, and small beside the rest."""
    head = shape.hidden * shape.vocab
    forward = shape.forward_stored
    matrices = max(1, round(forward / (shape.hidden * shape.ffn)))
    return [
        Sublayer("attention", shape.attention_params, shape.num_layers, 4, attends=True),
        Sublayer("feed-forward", forward, shape.num_layers, matrices, met=shape.forward_params / forward),
        Sublayer("head", head, 1, 1, quantized=False, last=True),
    ]


def by_whole_matrices(part: Sublayer, fractions: Fractions) -> Fractions:
    """What becomes of fractions where a matrix is in one place: where its middle falls, from disk to host to device.

    Source: FlexGen's code, `init_weight_list`.
    """
    _, host, disk = fractions
    middles = [(i + 0.5) / part.matrices for i in range(part.matrices)]
    on_disk = sum(middle < disk for middle in middles) / part.matrices
    away = sum(middle < disk + host for middle in middles) / part.matrices
    return 1 - away, away - on_disk, on_disk


def value_bytes(bits: int, group: int) -> float:
    """Bytes of a stored value, with its part of the group's step and least value."""
    return VALUE_BYTES if bits == 16 else bits / 8 + GROUP_BYTES / group


def weight_bytes(part: Sublayer, policy: OffloadPolicy) -> float:
    """Bytes of a part as it is stored."""
    return part.params * (value_bytes(policy.weight_bits, policy.group_size) if part.quantized else VALUE_BYTES)


def cache_values(shape: ModelShape) -> int:
    """Values of keys and values that a token adds in a layer."""
    return 2 * shape.num_kv_heads * shape.head_dim


def cache_bytes(shape: ModelShape, policy: OffloadPolicy) -> float:
    """Bytes that a token adds to the cache in a layer, as they are stored."""
    return cache_values(shape) * value_bytes(policy.kv_bits, policy.group_size)
