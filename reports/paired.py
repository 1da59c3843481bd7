"""Comparisons in pairs: the same examples answered in two ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np

#: Resamples of a bootstrap, and its seed: the same figures for the same records.
_RESAMPLES, _SEED = 2000, 0
#: Of tests, how sure; and with which power a loss would be seen.
LEVEL, POWER = 0.05, 0.8
#: Fewer examples than this say nothing: an interval by resampling them would be far too small.
FEWEST = 10
#: So many answers must be expected to turn wrong for six to do so with that power, which is where McNemar's exact test
#: begins to see a loss.
_FLIPS = 7.9


@dataclass(frozen=True)
class Paired:
    """A difference of means, new less old, with the 95 % interval of a paired bootstrap.

    `p`: of McNemar's exact test where all values are 0 or 1, else None. `seen`: the difference that would have been
    found with a power of 80 %.
    """

    difference: float
    low: float
    high: float
    p: float | None
    seen: float

    @property
    def significant(self) -> bool:
        """Whether there is a difference, at the level of 5 %."""
        return self.p < LEVEL if self.p is not None else not self.low <= 0 <= self.high


def paired(old: Sequence[float], new: Sequence[float], weights: Sequence[float] = ()) -> Paired:
    """Of values of the same examples in the same order, with what each counts for (nothing: all alike).

    Raises ValueError where there are not as many, or none.
    """
    if not old:
        raise ValueError("nothing to compare")
    differences = [b - a for a, b in zip(old, new, strict=True)]
    if weights:
        differences = _linear(differences, weights)
    binary = all(value in (0.0, 1.0) for value in (*old, *new))
    low, high = _interval(differences)
    p = mcnemar(sum(d > 0 for d in differences), sum(d < 0 for d in differences)) if binary else None
    seen = detectable(differences)
    return Paired(fmean(differences), low, high, p, max(seen, min(1.0, _FLIPS / len(differences))) if binary else seen)


def mcnemar(better: int, worse: int) -> float:
    """The exact two-sided p of so many examples that only one side has right. Source: McNemar 1947, by the binomial."""
    n, k = better + worse, min(better, worse)
    if not n:
        return 1.0
    tail = math.fsum(math.exp(_log_choose(n, i) - n * math.log(2)) for i in range(k + 1))
    return min(1.0, 2 * tail)


def detectable(differences: Sequence[float]) -> float:
    """The true difference that n pairs of this spread would show with a power of 80 %: normal approximation."""
    n = len(differences)
    middle = fmean(differences)
    spread = math.sqrt(math.fsum((d - middle) ** 2 for d in differences) / max(1, n - 1))
    normal = NormalDist()
    return (normal.inv_cdf(1 - LEVEL / 2) + normal.inv_cdf(POWER)) * spread / math.sqrt(n)


def _linear(differences: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Values whose plain mean is the weighted one and spreads as it does: a quotient of sums, linearised (Cochran,
    Sampling Techniques, 6.4)."""
    total = math.fsum(weights)
    mean = math.fsum(w * d for w, d in zip(weights, differences, strict=True)) / total
    scale = len(weights) / total
    return [mean + scale * w * (d - mean) for w, d in zip(weights, differences, strict=True)]


def _interval(differences: Sequence[float]) -> tuple[float, float]:
    """95 % of resampled means. Most differences of two runs are 0, and count without being drawn one by one."""
    n, rng = len(differences), np.random.default_rng(_SEED)
    apart = np.array([d for d in differences if d], np.float64)
    if not len(apart):
        return 0.0, 0.0
    draws = rng.binomial(n, len(apart) / n, size=_RESAMPLES)
    means = [float(rng.choice(apart, size=k).sum()) / n for k in draws]
    low, high = np.quantile(means, [LEVEL / 2, 1 - LEVEL / 2])
    return float(low), float(high)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
