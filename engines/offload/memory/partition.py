"""Cuts layers into contiguous stages, one a rank, so that the longest takes as little time as possible."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Seconds of stage `stage` with layers `first` to `last` - 1; infinite where it cannot have them.
StageSeconds = Callable[[int, int, int], float]
#: A cut is preferred to ones whose longest stage is predicted to need more than this part of its time: rates vary as
#: much from one measurement to the next.
_CLEARLY_FASTER = 0.9


@dataclass(frozen=True)
class Cut:
    """Where each stage ends, in layers, and the predicted seconds of each.

    `with_all_s`: the longest stage's, had every stage at least one layer.
    """

    ends: Sequence[int]
    seconds: Sequence[float]
    with_all_s: float

    @property
    def longest_s(self) -> float:
        return max(self.seconds)


def shortest_stages(layers: int, stages: int, seconds: StageSeconds, may_be_empty: bool = False) -> list[int]:
    """Where to end each stage so that the longest is as short as possible, and with it the sum of the squares of all,
    so that the others are even too. Each has a layer, unless `may_be_empty`, when only the last one needs any.

    Dynamic programming over (stage, first layer); exact in the longest stage, whatever the `seconds`.
    """
    fewest = 0 if may_be_empty else 1
    # of a stage and all after it, from a layer on: the longest, the sum of squares, where the first of them ends
    best = {(stages - 1, i): _joined(seconds(stages - 1, i, layers), (0.0, 0.0), layers) for i in range(layers)}
    for k in range(stages - 2, -1, -1):
        later = 1 if may_be_empty else stages - 1 - k  # layers that those after it need
        for i in range(layers - later - fewest + 1):
            best[k, i] = min(
                _joined(seconds(k, i, end) if end > i else 0.0, best[k + 1, end][:2], end)
                for end in range(i + fewest, layers - later + 1)
            )
    ends, first = [], 0
    for k in range(stages):
        first = best[k, first][2]
        ends.append(first)
    return ends


def chosen_cut(layers: int, even: Sequence[int], seconds: StageSeconds) -> Cut:
    """The cut for unequal ranks. Of cuts that are about as fast, the first of these: the `even` one, which equal ranks
    have; the best one with a layer for each; the best one, which may leave stages without any."""
    stages = len(even)
    cuts = [
        even,
        shortest_stages(layers, stages, seconds),
        shortest_stages(layers, stages, seconds, may_be_empty=True),
    ]
    times = [stage_seconds(ends, seconds) for ends in cuts]
    best = max(times[-1])
    chosen = next(i for i, each in enumerate(times) if best >= _CLEARLY_FASTER * max(each) or i == len(cuts) - 1)
    return Cut(cuts[chosen], times[chosen], max(times[1]))


def stage_seconds(ends: Sequence[int], seconds: StageSeconds) -> list[float]:
    """The seconds of each stage of a cut; none for one without layers."""
    starts = [0, *ends[:-1]]
    return [seconds(k, a, b) if b > a else 0.0 for k, (a, b) in enumerate(zip(starts, ends, strict=True))]


def _joined(run: float, later: tuple[float, float], end: int) -> tuple[float, float, int]:
    longest, squares = later
    return max(run, longest), run * run + squares, end
