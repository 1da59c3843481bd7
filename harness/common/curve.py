"""Interpolation of a measured curve."""

import itertools
import math
from collections.abc import Mapping


def interpolate(curve: Mapping[str, float], x: float) -> float:
    """The value at `x` > 0 of a curve by numbers as text: log-log linear between them, constant beyond both ends."""
    points = sorted((float(at), value) for at, value in curve.items())
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            share = math.log(x / x0) / math.log(x1 / x0)
            return math.exp(math.log(y0) + share * math.log(y1 / y0))
    return points[-1][1]
