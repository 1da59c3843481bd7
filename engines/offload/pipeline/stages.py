"""Which rank has which layers.

Stages follow each other on ranks 1, 2, ..., and the last one is rank 0's: it schedules, and has the logits where it
needs them. What goes back to the first stage is a token id for each sequence, with the next pass.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.offload.memory.partition import chosen_cut
from engines.offload.memory.stage_times import RankRates, StageTimes, alike
from engines.offload.model.stage import Stage
from engines.offload.pipeline.cut import even_ends, order_of
from harness.api import ModelShape


@dataclass(frozen=True)
class Division:
    """The stages by rank, in their order, without ranks that have no layers; and in words why they are so."""

    stages: Mapping[int, Stage]
    note: str = ""


def equal_stages(shape: ModelShape, ranks: int) -> Division:
    """Of ranks that are alike, so that the one with most weights has as few as possible; the head counts as a part of a
    layer. Raises HarnessError where a stage would have no layer."""
    return Division(_stages(even_ends(shape, ranks), order_of(ranks)))


def all_layers(shape: ModelShape, ranks: int) -> Division:
    """All layers on each of so many ranks, which have a part of every matrix."""
    return Division({rank: Stage(0, shape.num_layers, shape.num_layers) for rank in order_of(ranks)})


def timed_stages(times: StageTimes, rates: Sequence[RankRates]) -> Division:
    """Of ranks with these `rates`, by rank: equal stages where they are alike, else so that the longest stage takes as
    little time as possible, if that is clearly faster; a rank that would only slow the others down gets no layers.
    Raises as `equal_stages`."""
    order, layers = order_of(len(rates)), times.shape.num_layers
    if alike(rates):
        return equal_stages(times.shape, len(rates))
    cut = chosen_cut(layers, even_ends(times.shape, len(rates)), times.on([rates[rank] for rank in order]))
    stages = _stages(cut.ends, order)
    each = [
        f"rank {rank} has {stages[rank].last - stages[rank].first} ({_ms(seconds)})"
        for rank, seconds in zip(order, cut.seconds, strict=True)
        if rank in stages
    ]
    note = f"layers by the ranks' rates, with the predicted time of a token: {', '.join(each)}"
    if left_out := sorted(set(order) - set(stages)):
        note += (
            f"; none: rank {', '.join(map(str, left_out))}, as with layers on every rank the longest stage would take "
            f"{_ms(cut.with_all_s)}, not {_ms(cut.longest_s)}"
        )
    return Division(stages, note)


def _stages(ends: Sequence[int], order: Sequence[int]) -> dict[int, Stage]:
    starts = [0, *ends[:-1]]
    return {rank: Stage(a, b, ends[-1]) for rank, a, b in zip(order, starts, ends, strict=True) if b > a}


def _ms(seconds: float) -> str:
    return "more memory than it has" if math.isinf(seconds) else f"{1000 * seconds:.3g} ms"
