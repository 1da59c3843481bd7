"""The best fractions for given batches and bits, by a linear programme.

Source: FlexGen (Sheng et al. 2023), section 4.3, equation 1, with one variable for each interval between
synchronisations in place of the single maximum.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from engines.planning.closed_form import Seconds, SublayerCosts, decode_work, mixed_work, prefill_work, sync_intervals
from engines.planning.engine_cost_models import EngineCostModel
from engines.planning.machine import Machine
from engines.planning.memory import MemoryConstraint, capacity
from engines.planning.workload import Fractions, Lengths, sublayers
from harness.api import ModelShape, OffloadPolicy

_KINDS = ("weights", "cache", "activations")
#: Everything on the device, in host memory, or on disk.
_CORNERS: tuple[Fractions, ...] = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
#: Tie-break among placements of equal time: what a tier costs, as a share of the total time.
_TIER_COST = np.array([0.0, 1e-6, 1e-5])


class Programme:
    """Minimises the total length of all intervals; an interval is as long as the slowest of its lanes."""

    def __init__(self) -> None:
        self._cost: list[float] = []  # of each interval's variable
        self._lanes: list[tuple[Seconds, int]] = []  # affine seconds of a lane, and its interval
        self._memory: list[Seconds] = []  # affine share of a tier's memory that is taken

    def add_interval(self, lanes: Sequence[Seconds], count: float) -> None:
        """An interval that occurs so many times; `lanes` as in sync_intervals."""
        self._lanes += [(lane, len(self._cost)) for lane in lanes]
        self._cost.append(count)

    def add_memory(self, need: MemoryConstraint, available: float) -> None:
        """A tier of `available` bytes."""
        self._memory.append(np.array([*need.weights, *need.cache, *need.activations, need.constant]) / available)

    def best(self, policy: OffloadPolicy) -> OffloadPolicy | None:
        """The policy with the fractions of the shortest time; None if none fit. Fractions that it sets stay."""
        intervals = len(self._cost)
        affine = np.array([*(lane for lane, _ in self._lanes), *self._memory])
        chosen = -np.eye(intervals)[[interval for _, interval in self._lanes]]
        upper = np.hstack([affine[:, :-1], np.vstack([chosen, np.zeros((len(self._memory), intervals))])])
        limits = np.concatenate([np.zeros(len(self._lanes)), np.ones(len(self._memory))]) - affine[:, -1]
        sums = np.hstack([np.kron(np.eye(3), np.ones(3)), np.zeros((3, intervals))])
        cost = np.concatenate([np.tile(_TIER_COST, 3) * sum(self._cost), self._cost])
        bounds: list[tuple[float, float | None]] = []
        given = [getattr(policy, kind) for kind in _KINDS]
        for fractions in given:
            bounds += [(0, 1)] * 3 if fractions is None else [(f, f) for f in fractions]
        bounds += [(0, None)] * intervals
        solution = linprog(cost, upper, limits, sums, np.ones(3), bounds, method="highs")
        if not solution.success:
            return None
        found = solution.x[:-intervals].reshape(3, 3).tolist()
        triples = (own or tuple(shares) for own, shares in zip(given, found, strict=True))
        return replace(policy, **dict[str, Any](zip(_KINDS, triples, strict=True)))

    def seconds(self, fractions: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The total time [n] of placements [n, 9]: fractions on device, host and disk, of each kind in turn."""
        total = np.zeros(len(fractions))
        for interval, count in enumerate(self._cost):
            lanes = np.array([lane for lane, of in self._lanes if of == interval])
            total += count * (fractions @ lanes[:, :-1].T + lanes[:, -1]).max(axis=1)
        return total


def linear_programme(
    shape: ModelShape, policy: OffloadPolicy, lengths: Lengths, machine: Machine, engine: EngineCostModel,
    constraints: Sequence[MemoryConstraint],
) -> Programme:  # fmt: skip
    """The programme for a policy's batches and bits, within the machine's memory."""
    batch = policy.gpu_batch_size
    if policy.schedule == "sweep":
        passes = [(mixed_work(batch, lengths), lengths.generated)]
    else:
        decode = [decode_work(batch, lengths.mean_cached)]
        passes = [([prefill_work(batch, lengths)], 1), (decode, lengths.generated - 1)]
    on_device: dict[str, Any] = dict.fromkeys(_KINDS, _CORNERS[0])
    corners = [on_device, *(on_device | {kind: corner} for kind in _KINDS for corner in _CORNERS)]
    at_corners = [SublayerCosts(shape, replace(policy, **corner), machine, engine) for corner in corners]
    parts = sublayers(shape)
    programme = Programme()
    for works, times in passes:
        costs = [
            (
                _affine(c.load(part).sum(axis=0) for c in at_corners),
                _affine(c.batch(part, works).sum(axis=0) for c in at_corners),
            )
            for part in parts
        ]
        for lanes, count in sync_intervals(costs, parts, policy.num_gpu_batches, engine):
            programme.add_interval(lanes, count * times)
    room = capacity(machine.profile)
    for constraint in constraints:
        programme.add_memory(constraint, getattr(room, constraint.tier))
    return programme


def _affine(at_corners: Iterable[Seconds]) -> Seconds:
    """Seconds of each resource as an affine function of the fractions, between whose corners costs are linear.

    at_corners: with everything on the device, then with each kind in turn on each tier. Returns float64
    [resources, fractions + 1], the constant last.
    """
    on_device, *moved = at_corners
    return np.column_stack([*(seconds - on_device for seconds in moved), on_device])
