"""Models and machines as sizes and measured rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.api.common import Dtype


def mean_cached_tokens(prompt: float, generated: float) -> float:
    """Tokens that a request has in the KV cache on average while it generates: its prompt and half of its answer."""
    return prompt + generated / 2


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that arithmetic needs: FLOPs, weight bytes and KV bytes.

    `params_per_layer` counts what a token meets of one decoder layer's matrices (elements of the linear layers);
    `params_total` everything in the checkpoint, tied tensors once; `params_idle` what of it are experts that a
    token does not meet, in all layers together.
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
        """Of one layer's matrices those around attention: queries, keys, values and output."""
        return self.hidden * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def forward_params(self) -> int:
        """Of one layer's matrices those of its feed-forward that a token meets."""
        return self.params_per_layer - self.attention_params

    @property
    def forward_stored(self) -> int:
        """The same with the experts that it does not meet."""
        return self.forward_params + self.params_idle // self.num_layers

    def flops(self, new_tokens: int, context: float, logits: int) -> float:
        """Floating-point operations to run `new_tokens` tokens attending to `context` earlier ones on average.

        `logits` of them reach the head. A multiply-add counts as two.
        """
        dense = 2 * new_tokens * self.params_per_layer * self.num_layers
        attention = 4 * new_tokens * context * self.num_heads * self.head_dim * self.num_layers
        return dense + attention + 2.0 * logits * self.hidden * self.vocab

    def block_flops(self, sequences: int, prompt: int, generated: int) -> tuple[float, float]:
        """Of a block of sequences: of the pass over its prompts, and of the passes after it."""
        prefill = self.flops(sequences * prompt, prompt / 2, sequences)
        return prefill, (generated - 1) * self.flops(sequences, mean_cached_tokens(prompt, generated), sequences)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True)
class LocalModel:
    """A checkpoint made ready on this machine: what `ModelSpec` became.

    `quantized_as`: how the file that it was unpacked from stored most weights, such as Q4_1; nothing for floats.
    """

    path: str
    shape: ModelShape
    weight_bytes: int
    dtype: Dtype
    digest: str
    quantized_as: str = ""


@dataclass(frozen=True)
class MachineRates:
    """What one machine could do just before a launch, for the launch's bound.

    `gemm_flops[dtype][rows]` is FLOP/s of x[rows, k] @ W[k, n] at the `gemm_shape` (k, n); missing means
    not measured. Bandwidths are bytes/s. Each curve carries every sample. `h2d`: of pinned memory to the device, for a
    launch that has one; the GEMM rates are the device's then.
    """

    disk_read: tuple[float, ...] = ()
    gemm_shape: tuple[int, int] | None = None
    gemm_flops: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    measured_at: str = ""
    h2d: tuple[float, ...] = ()
