"""Whether a rate is measured closely enough to end before its time."""

import math
import statistics
from collections.abc import Iterable, Sequence

from harness.api import ServedRequest
from harness.common.serving_figures import values

#: The error of the intervals of all looks together.
_ERROR = 0.05
#: Batches of successive requests, whose means are taken as independent though neighbours wait for each other; the
#: fewest requests of one.
_BATCHES, _FEWEST = 10, 10


class EarlyStop:
    """Decides look by look whether the mean of each latency is known to a share of `width`, from end to end of its
    95 % confidence interval.

    Whoever looks often finds a narrow interval beside the mean by chance. So the k-th look has the part 1 / (k (k + 1))
    of the error, and the parts add up to all of it: however many looks there are, all intervals of a latency hold its
    mean together with 95 %. Source: the method of batch means (Law and Kelton, Simulation Modeling and Analysis,
    chapter 9), and Bonferroni's inequality over looks, as in group sequential tests.
    """

    def __init__(self, latencies: Iterable[str], width: float) -> None:
        from scipy.special import stdtrit  # here: importing takes a moment, for which no request should wait

        self._latencies, self._width = tuple(latencies), width
        self._quantile = stdtrit
        self._looks = 0

    def __call__(self, requests: Sequence[ServedRequest]) -> bool:
        """Whether the latencies of `requests`, in the order in which they were due, are known that closely. False for
        fewer than a hundred requests, and where one was not answered."""
        if len(requests) < _BATCHES * _FEWEST or any(request.outcome != "ok" for request in requests):
            return False
        self._looks += 1
        return all(self._is_narrow(values(requests, latency)) for latency in self._latencies)

    def _is_narrow(self, samples: Sequence[float]) -> bool:
        if len(samples) < _BATCHES * _FEWEST:
            return False
        low, high = self.interval(samples, self._looks)
        return high - low <= self._width * (low + high) / 2

    def interval(self, samples: Sequence[float], look: int) -> tuple[float, float]:
        """Of the mean of successive `samples`, of which there are a hundred or more, at the `look`-th look."""
        size = len(samples) // _BATCHES
        means = [statistics.fmean(samples[i * size : (i + 1) * size]) for i in range(_BATCHES)]
        mean = statistics.fmean(means)
        deviation = math.dist(means, [mean] * _BATCHES) / math.sqrt(_BATCHES * (_BATCHES - 1))
        half = deviation * float(self._quantile(_BATCHES - 1, 1 - _ERROR / (look * (look + 1)) / 2))
        return mean - half, mean + half
