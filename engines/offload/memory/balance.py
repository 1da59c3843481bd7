"""At how many rows the arithmetic of a pass takes as long as loading its weights."""

from harness.api import ModelShape


def io_compute_balance_rows(streamed_bytes: int, load_rate: float, flops: float, shape: ModelShape) -> int:
    """Rows at which a pass computes for as long as its streamed weights take to load.

    `load_rate` is in bytes/s, `flops` in FLOP/s. With fewer rows a pass waits for its weights. 1 if no weights stream.
    """
    return int(streamed_bytes / load_rate * flops / shape.flops(1, 0, 0)) if streamed_bytes else 1
