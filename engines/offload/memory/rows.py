"""How many rows a GEMM has: those that balance a pass's arithmetic with its loads, and padding in 16 bits."""

import bisect
from collections.abc import Callable

from harness.api import ModelShape

#: More rows than any pass has.
_MOST = 1 << 20


def io_compute_balance_rows(
    streamed_bytes: Callable[[int], float], load_rate: float, flops: float, shape: ModelShape, wait_s: float = 0.0
) -> int:
    """Rows at which a pass computes for as long as its streamed weights take to load, and as it waits anyway.

    streamed_bytes: of a pass of so many rows; fewer rows need fewer of a mixture's experts.
    load_rate: bytes/s; flops: FLOP/s; wait_s: seconds that links add to a pass, however few rows it has.

    With fewer rows a pass waits for its weights. In a mixture a row multiplies with few of the experts that all rows
    together need, so the balance is at many more rows: as many for each expert as for a matrix of a dense model. 1 if
    no weights stream and nothing is waited for.
    """

    def computes_as_long(rows: int) -> bool:
        return rows * shape.flops(1, 0, 0) / flops >= max(streamed_bytes(rows) / load_rate, wait_s)

    return max(1, bisect.bisect_left(range(_MOST), True, lo=1, key=computes_as_long))


def padded_rows(rows: int, value_bytes: int) -> int:
    """`rows`, or, for values of at most 2 bytes (`value_bytes`), rounded up to one of few sizes.

    In 16 bits oneDNN generates code for each number of rows, up to half a megabyte that the process never frees.
    """
    if value_bytes > 2 or rows < 2:
        return rows
    grain = 64 if rows > 256 else 32 if rows > 32 else 1 << (rows - 1).bit_length()
    return -(-rows // grain) * grain
