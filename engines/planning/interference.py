"""How fast an operation runs on a share of the machine's units while others run on the rest.

Source: NanoFlow (Zhu et al. 2025), section 5.5: units are counted by what they cost the products that run beside, so a
product on a share R of the units runs at R of its speed, and another kind of operation at P(R), which is measured.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

#: The fewest units that an operation gets.
LEAST_UNITS = 0.02


class Interference:
    """Performance by units for each kind of operation, linear between `points` (units, performance) in (0, 1), and from
    none to all. Kinds without points, such as `compute`, run in proportion to their units.

    More units never run slower: of measured points those stand that are the fastest so far. Raises ValueError for
    points out of range.
    """

    def __init__(self, points: Mapping[str, Sequence[tuple[float, float]]]) -> None:
        self._curves: dict[str, list[tuple[float, float]]] = {}
        for kind, measured in points.items():
            curve = [(0.0, 0.0)]
            for units, performance in sorted(measured):
                if not (0 < units < 1 and 0 < performance <= 1):
                    raise ValueError(f"{kind}: performance {performance} at {units} of the units")
                if units > curve[-1][0]:
                    curve.append((units, max(performance, curve[-1][1])))
            self._curves[kind] = [*curve, (1.0, 1.0)]

    def performance(self, kind: str, units: float) -> float:
        """The share of its speed with all units that an operation has with `units` of them."""
        for (low, low_speed), (high, high_speed) in pairwise(self._curves.get(kind, ((0.0, 0.0), (1.0, 1.0)))):
            if units <= high:
                return low_speed + (high_speed - low_speed) * (units - low) / (high - low)
        return 1.0

    def levels(self, kind: str) -> list[float]:
        """Units that were measured for a kind."""
        return [units for units, _ in self._curves.get(kind, ())[1:-1]]
