"""Statistics: of launches, ratios with intervals, tests and corrections; of answers to the same examples, differences.

Sources: Hodges and Lehmann 1963 (shift of two samples); Mann and Whitney 1947, exact and with ties by enumeration of
rank sums; Efron 1979 (percentile bootstrap); Holm 1979.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

import numpy as np

#: Two-sided level of a suite after Holm: a false regression is one-sided, so at most one suite in a hundred has one.
ALPHA = 0.02
#: Level and resamples of intervals; the fixed seed gives the same interval for the same records.
LEVEL, RESAMPLES, SEED = 0.95, 2000, 0
#: Above this many launches of both sides the test uses the normal approximation.
_EXACT_UP_TO = 50
#: The most splits of a sample into halves; samples of up to 11 launches use all of them.
_SPLITS = 500
#: Significance level of paired tests, and the power at which a difference counts as detectable.
PAIRED_LEVEL, POWER = 0.05, 0.8
#: The fewest examples that are compared: with fewer, a bootstrap interval is far too narrow.
FEWEST = 10
#: McNemar's exact test is significant from six one-sided flips on; this expected number of flips yields six with POWER.
_FLIPS = 7.9


@dataclass(frozen=True)
class Ratio:
    """Head over base: the Hodges-Lehmann ratio and its 95 % bootstrap interval (None below two launches a side)."""

    ratio: float
    low: float | None
    high: float | None

    @property
    def excludes_one(self) -> bool:
        """Whether the interval lies on one side of 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def hodges_lehmann(base: Sequence[float], head: Sequence[float]) -> float:
    """The median of all ratios of a launch of `head` to one of `base`. Raises ValueError unless all are positive."""
    return math.exp(float(np.median(_logs(head)[:, None] - _logs(base)[None, :])))


def ratio_of(base: Sequence[float], head: Sequence[float]) -> Ratio:
    """The Hodges-Lehmann ratio with its 95 % percentile bootstrap interval; each side is resampled separately."""
    ratio = hodges_lehmann(base, head)
    if min(len(base), len(head)) < 2:
        return Ratio(ratio, None, None)
    rng = np.random.default_rng(SEED)
    log_base, log_head = _logs(base), _logs(head)
    medians = np.empty(RESAMPLES)
    step = max(1, 1_000_000 // (len(base) * len(head)))  # resamples at a time, about the size of a CPU cache
    for start in range(0, RESAMPLES, step):
        size = min(step, RESAMPLES - start)
        resampled_base = log_base[rng.integers(len(base), size=(size, len(base)))]
        resampled_head = log_head[rng.integers(len(head), size=(size, len(head)))]
        shifts = resampled_head[:, :, None] - resampled_base[:, None, :]
        medians[start : start + size] = np.median(shifts.reshape(size, -1), axis=1)
    low, high = np.quantile(medians, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Ratio(ratio, math.exp(float(low)), math.exp(float(high)))


def interval_of(sample: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % percentile bootstrap interval of a median, for two or three launches their range; None for one."""
    if len(sample) < 2:
        return None
    rng = np.random.default_rng(SEED)
    values = np.asarray(sample, np.float64)
    medians = np.median(values[rng.integers(len(values), size=(RESAMPLES, len(values)))], axis=1)
    low, high = np.quantile(medians, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mann_whitney(base: Sequence[float], head: Sequence[float]) -> float:
    """Two-sided p of the Mann-Whitney test: exact up to 50 launches, also with ties."""
    n = len(base) + len(head)
    if n > _EXACT_UP_TO:
        from scipy.stats import mannwhitneyu

        return float(mannwhitneyu(base, head, alternative="two-sided", method="asymptotic").pvalue)
    ranks = _doubled_midranks([*base, *head])
    # rank_sums[k][s]: how many choices of k launches have the rank sum s
    rank_sums: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in base)]
    for rank in ranks:
        for k in range(len(base), 0, -1):
            for total, count in rank_sums[k - 1].items():
                rank_sums[k][total + rank] += count
    observed = sum(ranks[: len(base)])
    below = sum(count for total, count in rank_sums[-1].items() if total <= observed)
    above = sum(count for total, count in rank_sums[-1].items() if total >= observed)
    return min(1.0, 2 * min(below, above) / math.comb(n, len(base)))


def smallest_p(base: int, head: int) -> float:
    """The smallest p that this many launches can give: all launches of one side faster than all of the other."""
    return min(1.0, 2 / math.comb(base + head, base))


def launches_needed(cells: int, alpha: float = ALPHA) -> int:
    """The fewest launches a side with which one of `cells` cells can be significant after Holm."""
    return next(n for n in itertools.count(1) if smallest_p(n, n) * cells < alpha)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm-adjusted p values, which control the family-wise error rate."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def noise_floor(*samples: Sequence[float]) -> float | None:
    """The A/A noise: the relative difference between launches of the same cell.

    For a sample: the median, over its splits into halves, of the distance of the halves' Hodges-Lehmann ratio from 1.
    For several samples: the largest. None where no sample has four launches.
    """
    floors = [_halves(sample) for sample in samples if len(sample) >= 4]
    return max(floors, default=None)


def _halves(sample: Sequence[float]) -> float:
    logs = _logs(sample)
    n = len(logs)
    if math.comb(n, n // 2) <= _SPLITS:
        splits: list[Sequence[int]] = list(itertools.combinations(range(n), n // 2))
    else:
        rng = np.random.default_rng(SEED)
        splits = [rng.permutation(n)[: n // 2].tolist() for _ in range(_SPLITS)]
    distances = []
    for split in splits:
        chosen = np.zeros(n, bool)
        chosen[list(split)] = True
        distances.append(abs(float(np.median(logs[chosen][:, None] - logs[~chosen][None, :]))))
    return math.expm1(float(np.median(distances)))


def _logs(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if not len(values) or not all(v > 0 and math.isfinite(v) for v in values):
        raise ValueError("ratios need at least one launch a side, and positive, finite numbers")
    return np.log(np.asarray(values, np.float64))


def _doubled_midranks(values: Sequence[float]) -> list[int]:
    """Twice the midrank of each value (equal values share the mean of their ranks): integers, whose sums are exact."""
    counts = Counter(values)
    below, ranks = 0, {}
    for value in sorted(counts):
        ranks[value] = 2 * below + counts[value] + 1
        below += counts[value]
    return [ranks[value] for value in values]


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
        return self.p < PAIRED_LEVEL if self.p is not None else not self.low <= 0 <= self.high


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
    low, high = _interval_of_mean(differences)
    p = mcnemar(sum(d > 0 for d in differences), sum(d < 0 for d in differences)) if binary else None
    smallest = detectable(differences)
    if binary:
        smallest = max(smallest, min(1.0, _FLIPS / len(differences)))
    return Paired(fmean(differences), low, high, p, smallest)


def mcnemar(better: int, worse: int) -> float:
    """The exact two-sided p for `better` and `worse` examples, each right on one side only (McNemar 1947, binomial)."""
    from scipy.stats import binomtest

    return float(binomtest(better, better + worse).pvalue) if better + worse else 1.0


def detectable(differences: Sequence[float]) -> float:
    """The true difference that pairs of this spread show with a power of 80 %, by the normal approximation."""
    n, normal = len(differences), NormalDist()
    spread = stdev(differences) if n > 1 else 0.0
    return (normal.inv_cdf(1 - PAIRED_LEVEL / 2) + normal.inv_cdf(POWER)) * spread / math.sqrt(n)


def _linear(differences: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Values whose plain mean equals the weighted mean and has its variance: the ratio estimator, linearised (Cochran,
    Sampling Techniques, 6.4)."""
    total = math.fsum(weights)
    mean = math.fsum(w * d for w, d in zip(weights, differences, strict=True)) / total
    scale = len(weights) / total
    return [mean + scale * w * (d - mean) for w, d in zip(weights, differences, strict=True)]


def _interval_of_mean(differences: Sequence[float]) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of the mean. Draws only non-zero differences: most are 0."""
    n, rng = len(differences), np.random.default_rng(SEED)
    nonzero = np.array([d for d in differences if d], np.float64)
    if not len(nonzero):
        return 0.0, 0.0
    draws = rng.binomial(n, len(nonzero) / n, size=RESAMPLES)
    means = [float(rng.choice(nonzero, size=k).sum()) / n for k in draws]
    low, high = np.quantile(means, [PAIRED_LEVEL / 2, 1 - PAIRED_LEVEL / 2])
    return float(low), float(high)
