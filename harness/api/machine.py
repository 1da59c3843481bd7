"""Models and machines as sizes and measured rates."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.api.common import Dtype, HarnessError


def mean_cached_tokens(prompt: float, generated: float) -> float:
    """The mean number of a request's tokens in the KV cache while it generates: its prompt and half of its output."""
    return prompt + generated / 2


def mean_cached_length(lengths: Iterable[tuple[int, int]]) -> int:
    """The mean number of cached tokens over requests of (prompt, generated) tokens."""
    means = [int(mean_cached_tokens(prompt, generated)) for prompt, generated in lengths]
    return sum(means) // len(means)


def mean_generated(lengths: Sequence[tuple[int, int]]) -> int:
    """The mean number of generated tokens over requests of (prompt, generated) tokens."""
    return sum(generated for _, generated in lengths) // len(lengths)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder, from which FLOPs, weight bytes and KV bytes follow.

    `params_per_layer` counts the elements of one decoder layer's matrices that a token is multiplied with;
    `params_total` counts the whole checkpoint, tied tensors once; `params_idle` counts the experts that a token does
    not use, over all layers.
    """

    family: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    params_per_layer: int
    params_total: int
    params_idle: int = 0

    @property
    def attention_params(self) -> int:
        """Elements of one layer's attention matrices: queries, keys, values and output."""
        return self.hidden * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def forward_params(self) -> int:
        """Elements of one layer's feed-forward matrices that a token uses."""
        return self.params_per_layer - self.attention_params

    @property
    def forward_stored(self) -> int:
        """Elements of one layer's feed-forward matrices, unused experts included."""
        return self.forward_params + self.params_idle // self.num_layers

    @property
    def head_params(self) -> int:
        """Elements of the matrix that gives logits; fewer than hidden * vocab where embeddings are narrower."""
        return min(
            self.hidden * self.vocab, self.params_total - self.params_idle - self.params_per_layer * self.num_layers
        )

    def require_ids(self, where: str, ids: Sequence[int]) -> None:
        """Raises HarnessError naming `where` and the first token id outside the vocabulary."""
        for token in ids:
            if not 0 <= token < self.vocab:
                raise HarnessError(f"{where}: token id {token} is outside the vocabulary of {self.vocab}")

    def flops(self, new_tokens: int, context: float, logits: int) -> float:
        """Floating-point operations of `new_tokens` tokens that attend to `context` earlier tokens on average.

        `logits` of the tokens reach the head. A multiply-add counts as two.
        """
        dense = 2 * new_tokens * self.params_per_layer * self.num_layers
        attention = 4 * new_tokens * context * self.num_heads * self.head_dim * self.num_layers
        return dense + attention + 2.0 * logits * self.head_params

    def block_flops(self, sequences: int, prompt: int, generated: int) -> tuple[float, float]:
        """Floating-point operations of a block of sequences: of its prefill pass, and of all its decode passes."""
        prefill = self.flops(sequences * prompt, prompt / 2, sequences)
        return prefill, (generated - 1) * self.flops(sequences, mean_cached_tokens(prompt, generated), sequences)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True)
class ModelDescription:
    """A model as its configuration tells it, without weights: what a plan is made of.

    `dtype`: of the checkpoint's weights. `caveats`: what a performance model that knows only `shape` gets wrong, a line
    each.
    """

    id: str
    shape: ModelShape
    dtype: Dtype = "float16"
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True)
class LocalModel:
    """A checkpoint on this machine, ready to load; prepared from a `ModelSpec`.

    `quantized_as`: the type of most weights in the file that it was unpacked from, such as Q4_1; empty for floats.
    """

    path: str
    shape: ModelShape
    weight_bytes: int
    dtype: Dtype
    digest: str
    quantized_as: str = ""


@dataclass(frozen=True)
class MachineRates:
    """Rates measured on this machine just before a launch, for the launch's bound. Each holds all its samples.

    `gemm_flops[dtype][rows]` is FLOP/s of x[rows, k] @ W[k, n] at the `gemm_shape` (k, n); a missing key was not
    measured. For a launch with a device the GEMM rates are the device's. `disk_read`: bytes/s; `h2d`: bytes/s of
    copies from pinned memory to the device.
    """

    disk_read: tuple[float, ...] = ()
    gemm_shape: tuple[int, int] | None = None
    gemm_flops: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    measured_at: str = ""
    h2d: tuple[float, ...] = ()
