"""What engines that know no better keep free for a batch, beside weights."""

from __future__ import annotations

from harness.api import ModelShape

#: Held beyond the arithmetic: buffers of the matrix library, thread stacks, read-ahead (measured up to 40 MB).
SLACK_BYTES = 64 << 20
#: Of a device's memory what CUDA's context and its libraries take outside of torch's allocator.
CONTEXT_BYTES = 512 << 20


def working_bytes(shape: ModelShape, batch: int, tokens: int, dtype_bytes: int) -> tuple[int, int]:
    """Bytes of KV cache and of activations that `batch` sequences of `tokens` tokens take at their largest.

    KV: all layers, and one layer's copy while it grows. Activations: the residual stream, queries, keys, values
    and the feed-forward's input and output of one layer in prefill, and the last position's float32 logits with
    the copies `generate` makes.
    """
    kv = batch * tokens * shape.kv_bytes_per_token(dtype_bytes)
    prefill = batch * tokens * (6 * shape.hidden + 2 * shape.ffn) * dtype_bytes
    return kv + kv // shape.num_layers, prefill + 3 * batch * shape.vocab * 4
