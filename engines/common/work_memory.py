"""The memory that a batch needs beside the weights, and the check of a requirement against a budget."""

from harness.api import HardwareLimits, InfeasibleError, ModelShape, UnsupportedError

#: Kept free beyond the estimate: BLAS buffers, thread stacks, read-ahead (up to 40 MB measured). Bytes.
SLACK_BYTES = 64 << 20
#: Device memory that the CUDA context and its libraries take outside torch's allocator. Bytes.
CONTEXT_BYTES = 512 << 20


def working_bytes(shape: ModelShape, batch: int, tokens: int, dtype_bytes: int) -> tuple[int, int]:
    """Peak bytes of (KV cache, activations) for `batch` sequences of `tokens` tokens.

    KV cache: all layers, plus a copy of one layer while it grows. Activations: the residual stream, queries, keys,
    values and the feed-forward input and output of one layer in prefill, plus the float32 logits of the last position
    with the copies that `generate` makes.
    """
    kv = batch * tokens * shape.kv_bytes_per_token(dtype_bytes)
    prefill = batch * tokens * (6 * shape.hidden + 2 * shape.ffn) * dtype_bytes
    return kv + kv // shape.num_layers, prefill + 3 * batch * shape.vocab * 4


def require_memory(engine: str, needed: int, budget: int | None, purpose: str) -> None:
    """Raises InfeasibleError where the `needed` bytes exceed the `budget` (None: no limit)."""
    if budget is not None and needed > budget:
        raise InfeasibleError(
            f"{engine} needs at least {needed / 2**20:.1f} MiB for {purpose}; the budget is {budget / 2**20:.1f} MiB"
        )


def refuse_disk_limit(engine: str, limits: HardwareLimits) -> None:
    """Raises UnsupportedError where a cell limits the disk bandwidth of an engine that cannot throttle its reads."""
    if limits.disk_bandwidth is not None:
        raise UnsupportedError(f"engine {engine} cannot throttle its disk reads: leave limits.disk_bandwidth out")
