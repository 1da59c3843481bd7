"""What a job asks of a machine: lengths of a request, and the sublayers of a model with their parameters and bytes."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from harness.api import ModelShape, OffloadPolicy
from harness.api.machine import mean_cached_tokens

#: Of device, host and disk; they sum to 1.
Fractions = tuple[float, float, float]

FloatArray = npt.NDArray[np.float64]

#: Bytes of a value that is not quantized, and of an activation.
VALUE_BYTES = 2.0


@dataclass(frozen=True)
class Lengths:
    """Tokens of a request: its prompt, and what it generates."""

    prompt: int
    generated: int

    @property
    def max_cached(self) -> int:
        """Tokens in the KV cache when the request ends: the last generated token is never cached."""
        return self.prompt + self.generated - 1

    @property
    def mean_cached(self) -> float:
        """Tokens in the KV cache on average over the generation."""
        return mean_cached_tokens(self.prompt, self.generated)


@dataclass(frozen=True)
class Sublayer:
    """An attention or feed-forward sublayer, or the head: the unit in which FlexGen's schedule loads weights.

    params: values of its matrices.
    tensors: sizes of all its tensors in the order in which FlexGen places them: matrices with their biases, then norms.
    count: how many such sublayers the model has.
    attends: whether the KV cache is read and written here.
    quantized: whether the policy's weight bits apply.
    is_head: only rows that need logits pass through it.
    active_share: share of `params` that one token multiplies with, below 1 for experts. A pass is taken to need every
        expert: of Mixtral's eight, eight tokens miss few, and a pass has more tokens.
    """

    params: int
    count: int
    tensors: tuple[int, ...]
    attends: bool = False
    quantized: bool = True
    is_head: bool = False
    active_share: float = 1.0

    @property
    def middles(self) -> FloatArray:
        """Where the middle of each tensor falls, as a share of their sizes together."""
        sizes = np.array(self.tensors, np.float64)
        middles: FloatArray = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
        return middles


@lru_cache(maxsize=64)
def sublayers(shape: ModelShape) -> tuple[Sublayer, Sublayer, Sublayer]:
    """Attention, feed-forward and head, of which a stage without the last layer has none. Embedding tables are left
    out: small, and looked up only."""
    hidden, ffn = shape.hidden, shape.ffn
    forward = shape.forward_stored
    matrices = max(1, round(forward / (hidden * ffn)))
    each = forward // matrices
    if shape.family == "opt":  # every product has a bias, and a norm a scale and a bias
        attends: tuple[int, ...] = (*(hidden * hidden, hidden) * 4, hidden, hidden)
        feeds: tuple[int, ...] = (each, ffn, each, hidden, hidden, hidden)
        head: tuple[int, ...] = (hidden, hidden, hidden * shape.vocab)
    else:
        queries, keys = hidden * shape.num_heads * shape.head_dim, hidden * shape.num_kv_heads * shape.head_dim
        attends, feeds = (queries, keys, keys, queries, hidden), (*(each,) * matrices, hidden)
        head = (hidden, hidden * shape.vocab)
    return (
        Sublayer(shape.attention_params, shape.num_layers, attends, attends=True),
        Sublayer(forward, shape.num_layers, feeds, active_share=shape.forward_params / forward),
        Sublayer(hidden * shape.vocab, 1 if shape.head_params else 0, head, quantized=False, is_head=True),
    )


@lru_cache(maxsize=4096)
def by_whole_tensors(sublayer: Sublayer, fractions: Fractions) -> Fractions:
    """Fractions where each tensor lies in the tier that its middle falls into, counted from disk to host to device.

    Biases count: they put the middle of OPT's second feed-forward matrix just below three quarters. Source: FlexGen's
    code, `init_weight_list` and `get_choice`.
    """
    _, host, disk = fractions
    sizes, middles = np.array(sublayer.tensors, np.float64), sublayer.middles
    on_disk = float(sizes[middles < disk].sum() / sizes.sum())
    off_device = float(sizes[middles < disk + host].sum() / sizes.sum())
    return 1 - off_device, off_device - on_disk, on_disk


def weight_bytes(sublayer: Sublayer, policy: OffloadPolicy) -> float:
    """Stored bytes of one sublayer's weights."""
    bits = policy.weight_bits if sublayer.quantized else 16
    return sublayer.params * policy.value_bytes(bits, VALUE_BYTES)


def pinned_bytes(sublayer: Sublayer, policy: OffloadPolicy) -> float:
    """Bytes of one sublayer's weights in pinned memory, which torch allocates in powers of two for each tensor.

    The scales and minima of a quantized matrix are a tensor of their own.
    """
    bits = policy.weight_bits if sublayer.quantized else 16
    each = (bits / 8, policy.value_bytes(bits, VALUE_BYTES) - bits / 8)
    return sum(2.0 ** math.ceil(math.log2(size * b)) for size in sublayer.tensors for b in each if b)


def model_weight_bytes(shape: ModelShape, policy: OffloadPolicy) -> float:
    """Stored bytes of all weights."""
    return sum(weight_bytes(part, policy) * part.count for part in sublayers(shape))


def kv_values(shape: ModelShape) -> int:
    """Values that a token adds to the KV cache of a layer."""
    return 2 * shape.num_kv_heads * shape.head_dim


def kv_bytes(shape: ModelShape, policy: OffloadPolicy) -> float:
    """Stored bytes that a token adds to the KV cache of a layer."""
    return kv_values(shape) * policy.value_bytes(policy.kv_bits, VALUE_BYTES)
