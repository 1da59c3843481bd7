"""Placements that an engine realises and the memory holds, near the fractions of the linear programme.

Whole tensors and whole percents may need more of a tier than the programme's fractions do. So combinations of their
neighbours are tried, and a grid over the whole space if none of them fits.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from engines.planning.engine_cost_models import EngineCostModel
from engines.planning.memory import MemoryConstraint, TierBytes
from engines.planning.workload import Fractions, sublayers
from harness.api import ModelShape, OffloadPolicy

_CORNERS: tuple[Fractions, ...] = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
#: Shares at which the grid divides weights, where an engine divides them freely.
_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
#: Shares that neighbours have on a lower tier, where weights are divided freely.
_STEPS = (0.0, 0.01, 0.02, 0.04)


def placements(
    policy: OffloadPolicy, best: OffloadPolicy, shape: ModelShape, engine: EngineCostModel,
    constraints: Sequence[MemoryConstraint], room: TierBytes,
) -> Iterator[list[OffloadPolicy]]:  # fmt: skip
    """All realisable placements that fit: those near the programme's `best`, then those of the grid.

    What `policy` sets stays.
    """
    assert best.weights and best.cache and best.activations
    cuts = _cuts(shape) if engine.whole_tensors else _QUARTERS
    near = _neighbours(best.weights, cuts) if engine.whole_tensors else _lowered(best.weights)
    moved = _CORNERS if engine.whole_tensors else (_whole_percents(best.activations), *_CORNERS)
    for weights in (near, _grid(cuts)):
        fitting = []
        for w, a in itertools.product(
            [policy.weights] if policy.weights else dict.fromkeys(weights),
            [policy.activations] if policy.activations else dict.fromkeys(moved),
        ):
            placed = engine.placed_weights(shape, replace(policy, weights=w))
            left = [(c, getattr(room, c.tier) - c.needed(placed, (0.0, 0.0, 0.0), a)) for c in constraints]
            divides = policy.kv_bits == 16 or not engine.whole_tensors
            caches = [policy.cache] if policy.cache else _caches(best.cache, left, divides)
            fitting += [
                replace(policy, weights=w, cache=c, activations=a)
                for c in dict.fromkeys(caches)
                if all(sum(map(math.prod, zip(need.cache, c, strict=True))) <= free for need, free in left)
            ]
        yield fitting


def _cuts(shape: ModelShape) -> Sequence[float]:
    """Shares in whole percents, one for each way in which the middles of matrices divide them in two."""
    middles = sorted(
        middle
        for part in sublayers(shape)
        for middle, size in zip(part.middles, part.tensors, strict=True)
        if not part.is_head and size > shape.hidden * 4
    )
    return tuple(sorted({0.0, 1.0, *(math.ceil(100 * middle) / 100 for middle in middles[:-1])}))


def _neighbours(weights: Fractions, cuts: Sequence[float]) -> Iterator[Fractions]:
    """Divisions at the two cuts around each share of the programme's, and at one more to each side."""
    disk, below = weights[2], weights[1] + weights[2]
    for low, high in itertools.product(_around(disk, cuts), _around(below, cuts)):
        if low <= high:
            yield _divided(low, high)


def _around(share: float, cuts: Sequence[float]) -> Sequence[float]:
    at = int(np.searchsorted(cuts, share))
    return cuts[max(0, at - 2) : at + 2]


def _lowered(weights: Fractions) -> Iterator[Fractions]:
    """The fractions in whole percents, and with some of them moved to a lower tier."""
    device, host, _ = _whole_percents(weights)
    for off_device, off_host in itertools.product(_STEPS, _STEPS):
        least = max(0.0, device - off_device)
        yield _divided(min(1.0, max(0.0, 1 - device - host) + off_host), 1 - least)


def _grid(cuts: Sequence[float]) -> Iterator[Fractions]:
    return (_divided(low, high) for low, high in itertools.combinations_with_replacement(cuts, 2))


def _divided(disk: float, below: float) -> Fractions:
    """Fractions with a share `disk` on disk and a share `below` on disk and host."""
    below = max(disk, below)
    return round(1 - below, 4), round(below - disk, 4), round(disk, 4)


def _caches(best: Fractions, left: Sequence[tuple[MemoryConstraint, float]], divides: bool) -> Iterable[Fractions]:
    """The cache on one tier; if the engine divides it also as the programme has it, and as the tiers above can hold.

    left: bytes that weights and activations leave under each constraint.
    """
    yield from _CORNERS
    if not divides:
        return
    yield _whole_percents(best)
    device = _held(left, "device", 0)
    for share in (device, 0.0):
        host = min(1 - share, _held(left, "host", 1))
        yield _divided(1 - share - host, 1 - share)


def _held(left: Sequence[tuple[MemoryConstraint, float]], tier: str, at: int) -> float:
    """The share of the cache that a tier holds, in whole percents."""
    shares = [free / need.cache[at] for need, free in left if need.tier == tier and need.cache[at]]
    return min(1.0, max(0.0, math.floor(100 * min(shares, default=1.0)) / 100))


def _whole_percents(fractions: Fractions) -> Fractions:
    """Device and host rounded down to whole percents; the rest goes to the tier below, which has most room."""
    device, host = (min(1.0, max(0.0, math.floor(100 * f + 1e-6) / 100)) for f in fractions[:2])
    return _divided(0.0 if fractions[2] < 1e-9 else 1 - device - host, 1 - device)
