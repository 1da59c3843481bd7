"""Intervals of quantiles by order statistics, without a distribution (Conover 1999, section 3.2)."""

from collections.abc import Sequence

from reports.stats import LEVEL


def quantile_interval(sample: Sequence[float], quantile: float) -> tuple[float, float] | None:
    """An interval of at least 95 % for a quantile of independent values; None where there are too few: p99.9 needs
    about 3700."""
    from scipy.stats import binom

    n, tail = len(sample), (1 - LEVEL) / 2
    if n == 0:
        return None
    low, high = int(binom.ppf(tail, n, quantile)), int(binom.ppf(1 - tail, n, quantile)) + 1
    if low < 1 or high > n:
        return None
    ordered = sorted(sample)
    return ordered[low - 1], ordered[high - 1]
