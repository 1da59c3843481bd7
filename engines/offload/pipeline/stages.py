"""Which rank of a pipeline has which layers.

Stages follow each other on ranks 1, 2, ..., and the last one is rank 0's: it schedules, and has the logits where it
needs them. What goes back to the first stage is a token id for each sequence, with the next pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.offload.model.stage import Stage
from harness.api import HarnessError, ModelShape


@dataclass(frozen=True)
class Division:
    """The stages by rank, in their order."""

    stages: Mapping[int, Stage]


def order_of(ranks: int) -> list[int]:
    """The ranks in the order of their stages."""
    return [*range(1, ranks), 0]


def equal_stages(shape: ModelShape, ranks: int) -> Division:
    """So that the rank with most weights has as few as possible; the head counts as a part of a layer. Raises
    HarnessError where a stage would have no layer."""
    if ranks > shape.num_layers:
        raise HarnessError(
            f"policy.pipeline: {ranks} stages for {shape.num_layers} layers; each needs one, so use at most as many"
        )
    head = shape.head_params / shape.params_per_layer
    ends = evenly([1.0] * (shape.num_layers - 1) + [1.0 + head], ranks)
    starts = [0, *ends[:-1]]
    return Division({rank: Stage(a, b, ends[-1]) for rank, a, b in zip(order_of(ranks), starts, ends, strict=True)})


def evenly(costs: Sequence[float], parts: int) -> list[int]:
    """Where to end each of so many non-empty runs of `costs`, so that the largest sum is as small as possible, and with
    it the sum of their squares, so that others are even too.

    Dynamic programming over (parts left, first index); exact in the largest sum.
    """
    count = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # of costs[i:] in k runs: the largest sum, the sum of squares, and where the first run ends
    best = {(1, i): (sums[count] - sums[i], (sums[count] - sums[i]) ** 2, count) for i in range(count)}
    for k in range(2, parts + 1):
        for i in range(count - k + 1):
            best[k, i] = min(
                (max(run, largest), run**2 + squares, end)
                for end in range(i + 1, count - k + 2)
                for run, (largest, squares, _) in [(sums[end] - sums[i], best[k - 1, end])]
            )
    ends, start = [], 0
    for k in range(parts, 0, -1):
        start = best[k, start][2]
        ends.append(start)
    return ends
