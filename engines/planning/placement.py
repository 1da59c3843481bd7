"""The best fractions for given batches and bits, by a linear programme.

Source: FlexGen (Sheng et al. 2023), section 4.3, equation 1, with one variable for each interval between
synchronisations in place of the single maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import linprog

from engines.planning.closed_form import (
    BatchWork,
    ResourceSeconds,
    SublayerCosts,
    decode_work,
    mixed_work,
    prefill_work,
    sync_intervals,
)
from engines.planning.engine_cost_models import EngineCostModel
from engines.planning.machine import Machine
from engines.planning.memory import capacity, memory_constraints
from engines.planning.workload import Fractions, Lengths, Sublayer, sublayers
from harness.api import ModelShape, OffloadPolicy

#: Everything on the device, in host memory, or on disk.
_CORNERS: tuple[Fractions, ...] = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
#: Tie-break among placements of equal time: what a tier costs, as a share of the total time.
_TIER_COST = np.array([0.0, 1e-6, 1e-5])
#: Fractions: of three kinds (weights, cache, activations) on three tiers.
_VARIABLES = 9


def best_fractions(
    shape: ModelShape, policy: OffloadPolicy, lengths: Lengths, machine: Machine, engine: EngineCostModel,
    host_beside_device: bool,
) -> OffloadPolicy | None:  # fmt: skip
    """The policy with the fractions that make its block fastest within the machine's memory; None if none fit.

    Fractions that the policy sets stay. `host_beside_device` is as in sync_intervals.
    """
    programme = _Programme(shape, policy, machine, engine, host_beside_device)
    batch = policy.gpu_batch_size
    if policy.schedule == "sweep":
        programme.add(mixed_work(batch, lengths), lengths.generated)
    else:
        programme.add([prefill_work(batch, lengths)], 1)
        programme.add([decode_work(batch, lengths.mean_cached)], lengths.generated - 1)
    return programme.solve(lengths)


class _Programme:
    """Minimises the total length of all intervals; an interval is as long as the slowest of its lanes."""

    def __init__(
        self, shape: ModelShape, policy: OffloadPolicy, machine: Machine, engine: EngineCostModel,
        host_beside_device: bool,
    ) -> None:  # fmt: skip
        self._shape = shape
        self._policy = policy
        self._machine = machine
        self._engine = engine
        self._host_beside_device = host_beside_device
        self._parts = sublayers(shape)
        self._cost: list[float] = []  # of each interval's variable
        self._lanes: list[tuple[np.ndarray, float, int]] = []  # coefficients . x + constant <= interval

    def add(self, works: Sequence[BatchWork], times: float) -> None:
        """Adds a pass that runs so many times."""
        costs = [(self._load(part), self._unpack(part), self._batch(part, works)) for part in self._parts]
        batches = self._policy.num_gpu_batches
        for interval in sync_intervals(costs, self._parts, batches, self._engine, self._host_beside_device):
            variable = len(self._cost)
            self._cost.append(interval.count * times)
            self._lanes += [(*cost.total(resources), variable) for cost, resources in interval.lanes]

    def solve(self, lengths: Lengths) -> OffloadPolicy | None:
        """The policy with the best fractions."""
        intervals = len(self._cost)
        upper, limits = [], []
        for coefficients, constant, interval in self._lanes:
            row = np.zeros(_VARIABLES + intervals)
            row[:_VARIABLES] = coefficients
            row[_VARIABLES + interval] = -1
            upper.append(row)
            limits.append(-constant)
        room = capacity(self._machine.profile)
        for need in memory_constraints(self._shape, self._policy, lengths):
            available = getattr(room, need.tier)
            row = np.zeros(_VARIABLES + intervals)
            row[:_VARIABLES] = [c / available for c in (*need.weights, *need.cache, *need.activations)]
            upper.append(row)
            limits.append(1 - need.constant / available)
        sums = np.zeros((3, _VARIABLES + intervals))
        for kind in range(3):
            sums[kind, 3 * kind : 3 * kind + 3] = 1
        cost = np.concatenate([np.tile(_TIER_COST, 3) * sum(self._cost), self._cost])
        bounds: list[tuple[float, float | None]] = []
        for given in (self._policy.weights, self._policy.cache, self._policy.activations):
            bounds += [(0, 1)] * 3 if given is None else [(f, f) for f in given]
        bounds += [(0, None)] * intervals
        solution = linprog(cost, np.array(upper), np.array(limits), sums, np.ones(3), bounds, method="highs")
        if not solution.success:
            return None
        weights, cache, activations = (_rounded(solution.x[3 * kind : 3 * kind + 3]) for kind in range(3))
        policy = self._policy
        return replace(
            policy,
            weights=policy.weights or weights,
            cache=policy.cache or cache,
            activations=policy.activations or activations,
        )

    def _load(self, part: Sublayer) -> _Affine:
        return _Affine.of(0, [self._costs(weights=corner).load(part) for corner in _CORNERS])

    def _unpack(self, part: Sublayer) -> _Affine:
        return _Affine.constant(self._costs().unpack(part))

    def _batch(self, part: Sublayer, works: Sequence[BatchWork]) -> _Affine:
        on_device = self._costs().batch(part, works)
        cached = [self._costs(cache=corner).batch(part, works) - on_device for corner in _CORNERS]
        moved = [self._costs(activations=corner).batch(part, works) - on_device for corner in _CORNERS]
        return _Affine.constant(on_device) + _Affine.of(1, cached) + _Affine.of(2, moved)

    def _costs(
        self, weights: Fractions = _CORNERS[0], cache: Fractions = _CORNERS[0], activations: Fractions = _CORNERS[0]
    ) -> SublayerCosts:
        """Costs at a corner; between corners they are linear."""
        policy = replace(self._policy, weights=weights, cache=cache, activations=activations)
        return SublayerCosts(self._shape, policy, self._machine, self._engine)


class _Affine:
    """Seconds of each resource as an affine function of the nine fractions.

    coefficients: float64 [resources, fractions]; constant: float64 [resources].
    """

    def __init__(self, coefficients: np.ndarray, constant: np.ndarray) -> None:
        self._coefficients = coefficients
        self._constant = constant

    @classmethod
    def constant(cls, seconds: ResourceSeconds) -> _Affine:
        return cls(np.zeros((len(seconds.values), _VARIABLES)), np.array(seconds.values))

    @classmethod
    def of(cls, kind: int, corners: Sequence[ResourceSeconds]) -> _Affine:
        """Of one kind's fractions, by its values at the corners."""
        affine = cls.constant(ResourceSeconds())
        for tier, seconds in enumerate(corners):
            affine._coefficients[:, 3 * kind + tier] = seconds.values
        return affine

    def __add__(self, other: _Affine) -> _Affine:
        return _Affine(self._coefficients + other._coefficients, self._constant + other._constant)

    def __mul__(self, times: float) -> _Affine:
        return _Affine(self._coefficients * times, self._constant * times)

    def total(self, resources: Sequence[int]) -> tuple[np.ndarray, float]:
        """Coefficients and constant of the sum over some resources."""
        chosen = list(resources)
        return self._coefficients[chosen].sum(axis=0), float(self._constant[chosen].sum())


def _rounded(fractions: Sequence[float]) -> Fractions:
    """Device and host rounded down to whole percents; the rest goes to the tier below, which has most room."""
    device, host = (min(1.0, max(0.0, np.floor(100 * f + 1e-6) / 100)) for f in fractions[:2])
    if fractions[2] < 1e-9:
        host = 1 - device
    return float(device), float(host), float(max(0.0, 1 - device - host))
