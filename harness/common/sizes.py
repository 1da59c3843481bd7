"""Sizes for rooflines, plans and jobs: bytes of a stored value, and the mean number of a request's cached tokens."""

from collections.abc import Iterable

from harness.api.machine import mean_cached_tokens

#: Bytes of a group's scale and minimum, in float16 each.
_GROUP_BYTES = 4.0


def value_bytes(bits: int, group_size: int, plain_bytes: float) -> float:
    """Bytes of a stored value with its share of the group's scale and minimum; `plain_bytes` if it is not quantized."""
    return plain_bytes if bits == 16 else bits / 8 + _GROUP_BYTES / group_size


def mean_cached_length(lengths: Iterable[tuple[int, int]]) -> int:
    """The mean number of cached tokens over requests of (prompt, generated) tokens."""
    means = [int(mean_cached_tokens(prompt, generated)) for prompt, generated in lengths]
    return sum(means) // len(means)
