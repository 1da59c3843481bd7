"""Sizes that rooflines, plans and jobs share: bytes of a stored value, tokens that a request has cached on average."""

from __future__ import annotations

from collections.abc import Iterable

from harness.api.machine import mean_cached_tokens

#: Bytes of a group's scale and minimum, in float16 each.
_GROUP_BYTES = 4.0


def value_bytes(bits: int, group_size: int, plain_bytes: float) -> float:
    """Bytes of a stored value with its share of the group's scale and minimum; `plain_bytes` if it is not quantized."""
    return plain_bytes if bits == 16 else bits / 8 + _GROUP_BYTES / group_size


def mean_cached_length(lengths: Iterable[tuple[int, int]]) -> int:
    """Tokens that requests of (prompt, generated) tokens have in the KV cache on average, over all of them."""
    each = [int(mean_cached_tokens(prompt, generated)) for prompt, generated in lengths]
    return sum(each) // len(each)
