"""How many rows are multiplied where there are some: in 16 bits one of few numbers."""

from __future__ import annotations


def padded_rows(rows: int, value_bytes: int) -> int:
    """`rows`, or somewhat more; `value_bytes`: of a value that is multiplied.

    In 16 bits oneDNN makes code for each number of rows it meets, up to half a megabyte, and the process keeps it.
    """
    if value_bytes > 2 or rows < 2:
        return rows
    grain = 64 if rows > 256 else 32 if rows > 32 else 1 << (rows - 1).bit_length()
    return -(-rows // grain) * grain
