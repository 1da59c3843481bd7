"""Row padding of GEMMs in 16 bits, so that oneDNN compiles code for few shapes."""


def padded_rows(rows: int, value_bytes: int) -> int:
    """`rows`, or, for values of at most 2 bytes (`value_bytes`), rounded up to one of few sizes.

    In 16 bits oneDNN generates code for each number of rows, up to half a megabyte that the process never frees.
    """
    if value_bytes > 2 or rows < 2:
        return rows
    grain = 64 if rows > 256 else 32 if rows > 32 else 1 << (rows - 1).bit_length()
    return -(-rows // grain) * grain
