"""Total length of overlapping time intervals, such as those of requests, loads and trace lanes."""

import math
from collections.abc import Iterable


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (start, end) intervals, in their unit."""
    length, reach = 0.0, -math.inf
    for low, high in sorted(intervals):
        if high > reach:
            length += high - (low if low > reach else reach)
            reach = high
    return length
