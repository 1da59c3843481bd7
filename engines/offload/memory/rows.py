"""How many rows a GEMM has: those that balance a pass's arithmetic with its loads, and padding in 16 bits."""

from harness.api import ModelShape


def io_compute_balance_rows(streamed_bytes: int, load_rate: float, flops: float, shape: ModelShape) -> int:
    """Rows at which a pass computes for as long as its streamed weights take to load.

    `load_rate` is in bytes/s, `flops` in FLOP/s. With fewer rows a pass waits for its weights. 1 if no weights stream.
    """
    return int(streamed_bytes / load_rate * flops / shape.flops(1, 0, 0)) if streamed_bytes else 1


def padded_rows(rows: int, value_bytes: int) -> int:
    """`rows`, or, for values of at most 2 bytes (`value_bytes`), rounded up to one of few sizes.

    In 16 bits oneDNN generates code for each number of rows, up to half a megabyte that the process never frees.
    """
    if value_bytes > 2 or rows < 2:
        return rows
    grain = 64 if rows > 256 else 32 if rows > 32 else 1 << (rows - 1).bit_length()
    return -(-rows // grain) * grain
