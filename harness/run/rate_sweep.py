"""Finds the highest rate within the objectives: doubles rates up to saturation, then bisects."""

import math
from collections.abc import Callable

from harness.api import ServedRate, Slo
from harness.common.serving_figures import figures, within

#: Loads an engine with requests at a rate, per second.
Measure = Callable[[float], ServedRate]
#: Neighbouring rates whose ratio is at most this are not told apart: about 9 %.
PRECISION = 2 ** (1 / 8)
#: Throughput that rises by less than this factor while the rate doubles does not rise any more.
RISE = 1.05
#: The most doublings, and the most halvings from the first rate.
_MOST_STEPS = 12


def first_rate(request_s: float) -> float:
    """Where a sweep begins: about what one request at a time allows, as a power of 2, so that engines and launches are
    measured at the same rates."""
    return float(2.0 ** math.floor(math.log2(1 / max(request_s, 1e-3))))


def sweep(measure: Measure, start: float, slo: Slo | None) -> list[ServedRate]:
    """Measured rates, in the order of measurement.

    Doubles the rate from `start` until it is not within the objectives, or throughput does not rise: without
    objectives only the latter. Where `start` is not within them, halves it until a rate is. Bisects between the
    highest rate within them and the lowest that is not, in equal ratios. Rates at which nobody came within the time of
    arrivals say nothing: those that begin a sweep are left out, and one that halves ends there.
    """
    measured = [_first_with_requests(measure, start)]
    if slo is None:
        while len(measured) <= _MOST_STEPS and measured[-1].requests and _rises(measured):
            measured.append(measure(2 * _rate(measured[-1])))
        return measured
    good = within(measured[0], slo)
    while (
        len(measured) <= _MOST_STEPS
        and measured[-1].requests
        and within(measured[-1], slo) == good
        and (not good or _rises(measured))
    ):
        measured.append(measure(_rate(measured[-1]) * (2 if good else 0.5)))
    inside = [_rate(m) for m in measured if within(m, slo)]
    outside = [_rate(m) for m in measured if not within(m, slo)]
    if not inside or not outside:
        return measured
    low, high = max(inside), min(rate for rate in outside if rate > max(inside))
    while high / low > PRECISION * 1.001:
        measured.append(measure(math.sqrt(low * high)))
        if within(measured[-1], slo):
            low = _rate(measured[-1])
        else:
            high = _rate(measured[-1])
    return measured


def _first_with_requests(measure: Measure, start: float) -> ServedRate:
    measured = measure(start)
    for _ in range(_MOST_STEPS):
        if measured.requests:
            break
        measured = measure(2 * _rate(measured))
    return measured


def highest_within(measured: list[ServedRate], slo: Slo) -> ServedRate | None:
    """The highest rate that is within the objectives, below all that are not."""
    outside = [_rate(m) for m in measured if not within(m, slo)]
    inside = [m for m in measured if within(m, slo) and _rate(m) < min(outside, default=math.inf)]
    return max(inside, key=_rate, default=None)


def _rises(measured: list[ServedRate]) -> bool:
    """Whether the last step up still raised the throughput."""
    if len(measured) < 2:
        return True
    before, after = (figures(m, None)["completed_req_s"] or 0.0 for m in measured[-2:])
    return after >= RISE * before


def _rate(measured: ServedRate) -> float:
    assert measured.rate is not None
    return measured.rate
