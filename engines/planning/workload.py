"""What a job asks of a machine: lengths of a request, and the sublayers of a model with their parameters and bytes."""

from dataclasses import dataclass

from harness.api import ModelShape, OffloadPolicy
from harness.api.machine import mean_cached_tokens

#: Of device, host and disk; they sum to 1.
Fractions = tuple[float, float, float]

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

    params: values of its matrices, of which there are `matrices`, taken to be of one size.
    count: how many such sublayers the model has.
    attends: whether the KV cache is read and written here.
    quantized: whether the policy's weight bits apply.
    is_head: only rows that need logits pass through it.
    active_share: share of `params` that one token multiplies with, below 1 for experts. A pass is taken to need every
        expert: of Mixtral's eight, eight tokens miss few, and a pass has more tokens.
    """

    params: int
    count: int
    matrices: int
    attends: bool = False
    quantized: bool = True
    is_head: bool = False
    active_share: float = 1.0


def sublayers(shape: ModelShape) -> list[Sublayer]:
    """Attention, feed-forward and head. Embedding tables are left out: small, and looked up only."""
    forward = shape.forward_stored
    matrices = max(1, round(forward / (shape.hidden * shape.ffn)))
    return [
        Sublayer(shape.attention_params, shape.num_layers, 4, attends=True),
        Sublayer(forward, shape.num_layers, matrices, active_share=shape.forward_params / forward),
        Sublayer(shape.hidden * shape.vocab, 1, 1, quantized=False, is_head=True),
    ]


def by_whole_matrices(sublayer: Sublayer, fractions: Fractions) -> Fractions:
    """Fractions where each matrix lies in the tier that its middle falls into, counted from disk to host to device.

    Source: FlexGen's code, `init_weight_list`.
    """
    _, host, disk = fractions
    middles = [(i + 0.5) / sublayer.matrices for i in range(sublayer.matrices)]
    on_disk = sum(middle < disk for middle in middles) / sublayer.matrices
    off_device = sum(middle < disk + host for middle in middles) / sublayer.matrices
    return 1 - off_device, off_device - on_disk, on_disk


def weight_bytes(sublayer: Sublayer, policy: OffloadPolicy) -> float:
    """Stored bytes of one sublayer's weights."""
    bits = policy.weight_bits if sublayer.quantized else 16
    return sublayer.params * policy.value_bytes(bits, VALUE_BYTES)


def model_weight_bytes(shape: ModelShape, policy: OffloadPolicy) -> float:
    """Stored bytes of all weights."""
    return sum(weight_bytes(part, policy) * part.count for part in sublayers(shape))


def kv_values(shape: ModelShape) -> int:
    """Values that a token adds to the KV cache of a layer."""
    return 2 * shape.num_kv_heads * shape.head_dim


def kv_bytes(shape: ModelShape, policy: OffloadPolicy) -> float:
    """Stored bytes that a token adds to the KV cache of a layer."""
    return kv_values(shape) * policy.value_bytes(policy.kv_bits, VALUE_BYTES)
