"""Whether a rate is measured closely enough to end before its time."""

import math
import statistics
from collections.abc import Iterable, Sequence

from harness.api import ServedRequest
from harness.common.serving_figures import values

#: Batches of successive requests, whose means are taken as independent though neighbours wait for each other; Student's
#: t for the 95 % interval of so many; the fewest requests of one.
_BATCHES, _STUDENT_T, _FEWEST = 10, 2.262, 10


def is_close(requests: Sequence[ServedRequest], latencies: Iterable[str], width: float) -> bool:
    """Whether the 95 % confidence interval of the mean of each latency is at most `width` of that mean, from end to
    end. False for fewer than a hundred requests, and where one was not answered.

    `requests` are in the order in which they were due. Source: the method of batch means (Law and Kelton, Simulation
    Modeling and Analysis, chapter 9).
    """
    if any(request.outcome != "ok" for request in requests):
        return False
    return all(_is_narrow(values(requests, latency), width) for latency in latencies)


def _is_narrow(samples: Sequence[float], width: float) -> bool:
    size = len(samples) // _BATCHES
    if size < _FEWEST:
        return False
    means = [statistics.fmean(samples[i * size : (i + 1) * size]) for i in range(_BATCHES)]
    half: float = _STUDENT_T * statistics.stdev(means) / math.sqrt(_BATCHES)
    return 2 * half <= width * statistics.fmean(means)
