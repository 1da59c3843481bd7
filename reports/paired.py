"""Paired comparison of two sets of outcomes on the same examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np

#: Bootstrap resamples and their seed, fixed so that the same records give the same figures.
_RESAMPLES, _SEED = 2000, 0
#: Significance level of the tests, and the power at which a difference counts as detectable.
LEVEL, POWER = 0.05, 0.8
#: The fewest examples that are compared: with fewer, a bootstrap interval is far too narrow.
FEWEST = 10
#: McNemar's exact test is significant from six one-sided flips on; this expected number of flips yields six with POWER.
_FLIPS = 7.9


@dataclass(frozen=True)
class Paired:
    """A difference of means, new less old, with the 95 % interval of a paired bootstrap.

    `p`: of McNemar's exact test where all values are 0 or 1, else None. `detectable`: the difference that the test
    detects with a power of 80 %.
    """

    difference: float
    low: float
    high: float
    p: float | None
    detectable: float

    @property
    def significant(self) -> bool:
        """Whether the difference is significant at the 5 % level."""
        return self.p < LEVEL if self.p is not None else not self.low <= 0 <= self.high


def paired(old: Sequence[float], new: Sequence[float], weights: Sequence[float] = ()) -> Paired:
    """Compares values of the same examples in the same order; `weights` are per example, equal if empty.

    Raises ValueError where the lengths differ, or are 0.
    """
    if not old:
        raise ValueError("nothing to compare")
    differences = [b - a for a, b in zip(old, new, strict=True)]
    if weights:
        differences = _linear(differences, weights)
    binary = all(value in (0.0, 1.0) for value in (*old, *new))
    low, high = _interval(differences)
    p = mcnemar(sum(d > 0 for d in differences), sum(d < 0 for d in differences)) if binary else None
    smallest = detectable(differences)
    if binary:
        smallest = max(smallest, min(1.0, _FLIPS / len(differences)))
    return Paired(fmean(differences), low, high, p, smallest)


def mcnemar(better: int, worse: int) -> float:
    """The exact two-sided p for `better` and `worse` examples, each right on one side only (McNemar 1947, binomial)."""
    n, k = better + worse, min(better, worse)
    if not n:
        return 1.0
    tail = math.fsum(math.exp(_log_choose(n, i) - n * math.log(2)) for i in range(k + 1))
    return min(1.0, 2 * tail)


def detectable(differences: Sequence[float]) -> float:
    """The true difference that pairs of this spread show with a power of 80 %, by the normal approximation."""
    n = len(differences)
    middle = fmean(differences)
    spread = math.sqrt(math.fsum((d - middle) ** 2 for d in differences) / max(1, n - 1))
    normal = NormalDist()
    return (normal.inv_cdf(1 - LEVEL / 2) + normal.inv_cdf(POWER)) * spread / math.sqrt(n)


def _linear(differences: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Values whose plain mean equals the weighted mean and has its variance: the ratio estimator, linearised (Cochran,
    Sampling Techniques, 6.4)."""
    total = math.fsum(weights)
    mean = math.fsum(w * d for w, d in zip(weights, differences, strict=True)) / total
    scale = len(weights) / total
    return [mean + scale * w * (d - mean) for w, d in zip(weights, differences, strict=True)]


def _interval(differences: Sequence[float]) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of the mean. Draws only non-zero differences: most are 0."""
    n, rng = len(differences), np.random.default_rng(_SEED)
    nonzero = np.array([d for d in differences if d], np.float64)
    if not len(nonzero):
        return 0.0, 0.0
    draws = rng.binomial(n, len(nonzero) / n, size=_RESAMPLES)
    means = [float(rng.choice(nonzero, size=k).sum()) / n for k in draws]
    low, high = np.quantile(means, [LEVEL / 2, 1 - LEVEL / 2])
    return float(low), float(high)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
