"""Two samples of launches: how many times one is the other, and how sure that is. Pure functions of positive numbers.

Sources: Hodges and Lehmann 1963 (shift of two samples); Mann and Whitney 1947, exact and with ties by enumeration of
rank sums; Efron 1979 (percentile bootstrap); Holm 1979.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Two-sided level of a whole suite, after Holm: a false alarm has one direction, so at most one suite of a hundred.
ALPHA = 0.02
#: Of intervals, and how many resamples they come from; the seed is fixed, so the same records give the same interval.
LEVEL, RESAMPLES, SEED = 0.95, 2000, 0
#: Above this many launches of both sides together the exact distribution is as good as normal.
_EXACT_UP_TO = 50
#: Splits of a sample into halves that are looked at, all of them up to 11 launches.
_SPLITS = 500


@dataclass(frozen=True)
class Ratio:
    """Head over base: the Hodges-Lehmann ratio with its bootstrap interval; None below two launches a side."""

    ratio: float
    low: float | None
    high: float | None

    @property
    def excludes_one(self) -> bool:
        """Whether the interval holds only ratios above, or only ratios below, 1."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


def hodges_lehmann(base: Sequence[float], head: Sequence[float]) -> float:
    """The median of all quotients of a launch of `head` by one of `base`. Raises ValueError if one is not positive."""
    return math.exp(float(np.median(_logs(head)[:, None] - _logs(base)[None, :])))


def ratio_of(base: Sequence[float], head: Sequence[float]) -> Ratio:
    """The Hodges-Lehmann ratio with its percentile bootstrap interval of 95 %, each side resampled by itself."""
    ratio = hodges_lehmann(base, head)
    if min(len(base), len(head)) < 2:
        return Ratio(ratio, None, None)
    rng = np.random.default_rng(SEED)
    log_base, log_head = _logs(base), _logs(head)
    medians = np.empty(RESAMPLES)
    step = max(1, 1_000_000 // (len(base) * len(head)))  # so many at once fit the processor's caches, more or less
    for start in range(0, RESAMPLES, step):
        size = min(step, RESAMPLES - start)
        some_base = log_base[rng.integers(len(base), size=(size, len(base)))]
        some_head = log_head[rng.integers(len(head), size=(size, len(head)))]
        shifts = some_head[:, :, None] - some_base[:, None, :]
        medians[start : start + size] = np.median(shifts.reshape(size, -1), axis=1)
    low, high = np.quantile(medians, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Ratio(ratio, math.exp(float(low)), math.exp(float(high)))


def interval_of(sample: Sequence[float]) -> tuple[float, float] | None:
    """Percentile bootstrap interval of 95 % of a median; of two or three launches their range. None of one launch."""
    if len(sample) < 2:
        return None
    rng = np.random.default_rng(SEED)
    values = np.asarray(sample, np.float64)
    medians = np.median(values[rng.integers(len(values), size=(RESAMPLES, len(values)))], axis=1)
    low, high = np.quantile(medians, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mann_whitney(base: Sequence[float], head: Sequence[float]) -> float:
    """Two-sided p that both samples come from one distribution: exact up to 50 launches, ties or not."""
    n = len(base) + len(head)
    if n > _EXACT_UP_TO:
        from scipy.stats import mannwhitneyu

        return float(mannwhitneyu(base, head, alternative="two-sided", method="asymptotic").pvalue)
    ranks = _doubled_midranks([*base, *head])
    # how many choices of len(base) launches have each sum of ranks
    choices: list[Counter[int]] = [Counter({0: 1}), *(Counter() for _ in base)]
    for rank in ranks:
        for taken in range(len(base), 0, -1):
            for total, count in choices[taken - 1].items():
                choices[taken][total + rank] += count
    own = sum(ranks[: len(base)])
    below = sum(count for total, count in choices[-1].items() if total <= own)
    above = sum(count for total, count in choices[-1].items() if total >= own)
    return min(1.0, 2 * min(below, above) / math.comb(n, len(base)))


def smallest_p(base: int, head: int) -> float:
    """The least p that so many launches can give: all of one side above all of the other."""
    return min(1.0, 2 / math.comb(base + head, base))


def launches_needed(cells: int, alpha: float = ALPHA) -> int:
    """Launches on each side with which one cell of so many can be told at all, after Holm."""
    return next(n for n in itertools.count(1) if smallest_p(n, n) * cells < alpha)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p of each: below a level, it holds at that level for all of them together."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def noise_floor(*samples: Sequence[float]) -> float | None:
    """By how much launches of one and the same thing seem to differ, as a part of 1: the A/A noise.

    Of each sample the median, over its splits into halves, of how far the Hodges-Lehmann ratio of the halves is from 1;
    of several samples the largest. None where no sample has four launches.
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
    apart = []
    for split in splits:
        chosen = np.zeros(n, bool)
        chosen[list(split)] = True
        apart.append(abs(float(np.median(logs[chosen][:, None] - logs[~chosen][None, :]))))
    return math.expm1(float(np.median(apart)))


def _logs(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if not len(values) or not all(v > 0 and math.isfinite(v) for v in values):
        raise ValueError("ratios are of positive, finite numbers, and at least one of them on each side")
    return np.log(np.asarray(values, np.float64))


def _doubled_midranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each value, from 1; equal values share the middle of their ranks. Whole numbers, so that sums
    of them can be told apart exactly."""
    counts = Counter(values)
    below, ranks = 0, {}
    for value in sorted(counts):
        ranks[value] = 2 * below + counts[value] + 1
        below += counts[value]
    return [ranks[value] for value in values]
