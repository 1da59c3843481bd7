"""Mutations of valid inputs, for hypothesis: cut, repeat, swap, flip, and insert words of the format."""

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis.strategies import DrawFn

_MOST = 1 << 20


@st.composite
def mutated(draw: DrawFn, seeds: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """One of the seeds after some edits, or any bytes at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    content = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 5))):
        first, last = sorted((draw(st.integers(0, len(content))), draw(st.integers(0, len(content)))))
        part = content[first:last]
        how = draw(st.sampled_from(["insert", "replace", "cut", "end", "repeat", "flip", "bytes"]))
        if how == "insert":
            part = draw(st.sampled_from(words)) + part
        elif how == "replace":
            part = draw(st.sampled_from(words))
        elif how == "cut":
            part = b""
        elif how == "end":
            content, part = content[:last], content[first:last]
        elif how == "repeat":
            part *= draw(st.integers(2, 8))
        elif how == "flip" and part:
            at = draw(st.integers(0, len(part) - 1))
            part = part[:at] + bytes([part[at] ^ 1 << draw(st.integers(0, 7))]) + part[at + 1 :]
        elif how == "bytes":
            part = draw(st.binary(max_size=8))
        content = (content[:first] + part + content[last:])[:_MOST]
    return content
