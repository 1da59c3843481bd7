"""Statistics: of launches, ratios with intervals, tests and corrections; of answers to the same examples, differences.

A ratio is everywhere the quotient of the medians that tables show. Sources: Hodges and Lehmann 1963 (the interval of a
shift, by inverting the rank test); Mann and Whitney 1947, exact and with ties by enumeration of rank sums; Welch 1947;
Efron 1979 (bootstrap of examples); Holm 1979. `python -m tests.simulate_coverage` prints how often the intervals hold
the truth.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, stdev

import numpy as np

Logs = np.ndarray[tuple[int], np.dtype[np.float64]]
#: Two-sided level of a suite after Holm: a false regression is one-sided, so at most one suite in a hundred has one.
ALPHA = 0.02
#: Level of intervals; resamples of the bootstrap, whose fixed seed gives the same interval for the same records.
LEVEL, RESAMPLES, SEED = 0.95, 2000, 0
#: With fewer launches there is no interval: two would need a spread known from elsewhere.
FEWEST_LAUNCHES = 3
#: Above this many launches of both sides ranks use the normal approximation.
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
    """Head over base: the quotient of medians and its 95 % interval (None below three launches a side)."""

    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def excludes_one(self) -> bool:
        """Whether the interval lies on one side of 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high

    @property
    def effect(self) -> float:
        """The relative difference, the same for a ratio and its reciprocal."""
        return max(self.ratio, 1 / self.ratio) - 1


def quotient_of_medians(base: Sequence[float], head: Sequence[float]) -> float:
    """The median launch of `head` over that of `base`. Raises ValueError unless all are positive, finite numbers."""
    for side in (base, head):
        if not len(side) or not all(v > 0 and math.isfinite(v) for v in side):
            raise ValueError("ratios need at least one launch a side, and positive, finite numbers")
    return float(median(head) / median(base))


def ratio_of(base: Sequence[float], head: Sequence[float]) -> Ratio:
    """The quotient of medians with its interval of at least 95 %, for launches that are independent.

    The interval holds each ratio that the exact Mann-Whitney test at 5 % does not reject. Three and up to four launches
    cannot be rejected at 5 %: they get Welch's t interval of the logarithms. Sides whose launches scatter in different
    ways can have a quotient outside of it; then the interval reaches to the quotient.
    """
    ratio = quotient_of_medians(base, head)
    if min(len(base), len(head)) < FEWEST_LAUNCHES:
        return Ratio(ratio)
    log_base, log_head = np.log(base), np.log(head)
    shifts = np.sort(log_head[:, None] - log_base[None, :], axis=None)
    outside = _shifts_outside(len(base), len(head))
    low, high = (shifts[outside - 1], shifts[-outside]) if outside else _welch(log_base, log_head)
    return Ratio(ratio, min(ratio, math.exp(float(low))), max(ratio, math.exp(float(high))))


@functools.cache
def _shifts_outside(base: int, head: int) -> int:
    """k such that the k-th smallest and k-th largest shift bound the interval; 0 where ranks cannot give one."""
    if base + head > _EXACT_UP_TO:
        spread = math.sqrt(base * head * (base + head + 1) / 12)
        return max(1, math.floor(base * head / 2 - NormalDist().inv_cdf((1 + LEVEL) / 2) * spread))
    sums = _rank_sums(tuple(range(1, base + head + 1)), base)
    smallest, below = base * (base + 1) // 2, 0
    for k in range(base * head + 1):  # k: the Mann-Whitney statistic
        below += sums[smallest + k]
        if 2 * below > (1 - LEVEL) * math.comb(base + head, base):
            return k
    raise AssertionError("the sums of all choices are all choices")


def _welch(base: Logs, head: Logs) -> tuple[float, float]:
    """Welch's t interval of the difference of means, head less base."""
    from scipy.special import stdtrit

    shift = float(head.mean() - base.mean())
    parts = [float(side.var(ddof=1)) / len(side) for side in (base, head)]
    if not sum(parts):
        return shift, shift
    freedom = sum(parts) ** 2 / sum(p**2 / (len(side) - 1) for p, side in zip(parts, (base, head), strict=True))
    reach = float(stdtrit(freedom, (1 + LEVEL) / 2)) * math.sqrt(sum(parts))
    return shift - reach, shift + reach


def interval_of(sample: Sequence[float]) -> tuple[float, float] | None:
    """An interval of at least 95 % for the median of independent launches; None below three.

    By order statistics from six launches on, which needs no distribution (Conover, Practical Nonparametric Statistics,
    3.2); by Student's t on the logarithms for three to five.
    """
    n = len(sample)
    if n < FEWEST_LAUNCHES:
        return None
    tails = itertools.accumulate(math.comb(n, k) for k in range(n))
    outside = sum(1 for tail in tails if 2 * tail <= (1 - LEVEL) * 2**n)
    if outside:
        ordered = sorted(sample)
        return ordered[outside - 1], ordered[-outside]
    from scipy.special import stdtrit

    logs = np.log(sample)
    reach = float(stdtrit(n - 1, (1 + LEVEL) / 2)) * float(logs.std(ddof=1)) / math.sqrt(n)
    return math.exp(float(logs.mean()) - reach), math.exp(float(logs.mean()) + reach)


def ratio_of_runs(bases: Sequence[Sequence[float]], head: Sequence[float]) -> tuple[Ratio, float]:
    """Head over several runs of the base, with the interval and the two-sided p of a run among such runs.

    The unit is a run, whose figure is the median of its launches; that of the base is the geometric mean over its runs.
    For runs that followed each other, and between which the machine drifts. Student's t of one further observation,
    with as many degrees of freedom as further runs of the base. A head of fewer launches than the bases is taken for
    that much noisier. Slow stretches make a run's median far from normal, which few runs cannot show, but hardly its
    fastest launch: p is the larger of both figures. Raises ValueError below two runs.
    """
    from scipy.special import stdtr, stdtrit

    freedom, fewer = len(bases) - 1, max(1.0, min(map(len, bases)) / len(head))
    if freedom < 1:
        raise ValueError("the spread of runs needs two of them")

    def shift_of(figure: Callable[[Sequence[float]], float]) -> tuple[float, float, float]:
        levels = [math.log(figure(base)) for base in bases]
        shift = math.log(figure(head)) - fmean(levels)
        spread = stdev(levels) * math.sqrt(fewer + 1 / len(levels))
        return shift, spread, 2 * float(stdtr(freedom, -abs(shift) / spread)) if spread else float(shift == 0)

    shift, spread, p = shift_of(median)
    reach = float(stdtrit(freedom, (1 + LEVEL) / 2)) * spread
    return Ratio(*(math.exp(log) for log in (shift, shift - reach, shift + reach))), max(p, shift_of(max)[2])


def mann_whitney(base: Sequence[float], head: Sequence[float]) -> float:
    """Two-sided p of the Mann-Whitney test: exact up to 50 launches, also with ties."""
    from scipy.stats import mannwhitneyu, rankdata

    n = len(base) + len(head)
    if n > _EXACT_UP_TO:
        return float(mannwhitneyu(base, head, alternative="two-sided", method="asymptotic").pvalue)
    ranks = [round(2 * rank) for rank in rankdata([*base, *head])]  # ties have half ranks; sums of integers are exact
    observed, sums = sum(ranks[: len(base)]), _rank_sums(tuple(sorted(ranks)), len(base))
    below = sum(count for total, count in sums.items() if total <= observed)
    above = sum(count for total, count in sums.items() if total >= observed)
    return min(1.0, 2 * min(below, above) / math.comb(n, len(base)))


@functools.lru_cache(1000)
def _rank_sums(ranks: tuple[int, ...], chosen: int) -> Counter[int]:
    """How many choices of so many of these ranks have which sum."""
    sums: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in range(chosen))]  # by how many are chosen
    for rank in ranks:
        for k in range(chosen, 0, -1):
            for total, count in sums[k - 1].items():
                sums[k][total + rank] += count
    return sums[-1]


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

    For a sample: the median, over its splits into halves, of the distance of the halves' ratio from 1.
    For several samples: the largest. None where no sample has four launches.
    """
    floors = [_halves(sample) for sample in samples if len(sample) >= 4]
    return max(floors, default=None)


def _halves(sample: Sequence[float]) -> float:
    logs = np.log(sample)
    n, half = len(logs), len(logs) // 2
    if math.comb(n, half) <= _SPLITS:
        orders = np.array([(*split, *sorted(set(range(n)) - set(split))) for split in
                           itertools.combinations(range(n), half)])  # fmt: skip
    else:
        orders = np.random.default_rng(SEED).permuted(np.tile(np.arange(n), (_SPLITS, 1)), axis=1)
    parts = logs[orders]
    distances = np.abs(np.median(parts[:, :half], axis=1) - np.median(parts[:, half:], axis=1))
    return math.expm1(float(np.median(distances)))


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
    spread = stdev(differences) if len(differences) > 1 else 0.0
    normal = NormalDist()
    return (normal.inv_cdf(1 - PAIRED_LEVEL / 2) + normal.inv_cdf(POWER)) * spread / math.sqrt(len(differences))


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
