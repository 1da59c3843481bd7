"""Rounds the rows of a product up to one of few sizes, so that oneDNN compiles few kernels."""

from __future__ import annotations


def rows_for(rows: int, value_bytes: int) -> int:
    """Rows to multiply for `rows` rows of data in a dtype of `value_bytes` bytes.

    In 16 bits oneDNN compiles a kernel of up to half a megabyte for every new number of rows and never frees it.
    """
    if value_bytes > 2 or rows < 2:
        return rows
    grain = 64 if rows > 256 else 32 if rows > 32 else 1 << (rows - 1).bit_length()
    return -(-rows // grain) * grain
