"""The best fractions for given batches and bits: a linear programme.

Source: FlexGen (Sheng et al. 2023), section 4.3, equation 1, with each maximum of the cost as variables of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import linprog

from engines.planning.closed_form import Layers, Pass, Seconds, slots
from engines.planning.engine_cost_models import EngineCostModel
from engines.planning.machine import Machine
from engines.planning.memory import capacity, rows
from engines.planning.workload import Fractions, Lengths, Sublayer, sublayers
from harness.api import ModelShape, OffloadPolicy

#: Device, host or disk alone.
_CORNERS: tuple[Fractions, ...] = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
#: What a fraction of a tier costs beside time, in parts of a slot.
_HIGHER = np.array([0.0, 1e-6, 1e-5])
#: Fractions, of weights, cache and activations.
_VARIABLES = 9


def best_fractions(
    shape: ModelShape, policy: OffloadPolicy, lengths: Lengths, machine: Machine, style: EngineCostModel, separate: bool
) -> OffloadPolicy | None:
    """The policy with the fractions that make its block fastest within the machine's memory; None where none fit.

    Fractions that it names stay. `separate`: as in closed_form.py.
    """
    programme = _Programme(shape, policy, machine, style, separate)
    prompt, steps, batch = lengths.prompt, lengths.generated, policy.gpu_batch_size
    later = Pass(batch, prompt + steps / 2, batch, False)
    if policy.schedule == "sweep":
        programme.add([later, Pass(batch * prompt / steps, prompt / 2, batch / steps, True)], steps)
    else:
        programme.add([Pass(batch * prompt, prompt / 2, batch, True)], 1)
        programme.add([later], steps - 1)
    return programme.solve(lengths)


class _Programme:
    """Minimise the sum of all slots' seconds; a slot lasts as long as the slowest of what runs in it side by side."""

    def __init__(
        self, shape: ModelShape, policy: OffloadPolicy, machine: Machine, style: EngineCostModel, separate: bool
    ) -> None:
        self._separate = separate
        self._shape = shape
        self._policy = policy
        self._machine = machine
        self._style = style
        self._parts = sublayers(shape)
        self._cost: list[float] = []  # of each slot's variable
        self._limits: list[tuple[np.ndarray, float, int]] = []  # coefficients . x + constant <= slot

    def add(self, works: Sequence[Pass], times: float) -> None:
        """A pass that is run so many times."""
        costs = [(self._load(part), self._unpack(part), self._batch(part, works)) for part in self._parts]
        for slot in slots(costs, self._parts, self._policy.num_gpu_batches, self._style, self._separate):
            variable = len(self._cost)
            self._cost.append(slot.count * times)
            self._limits += [(*spent.of_turns(resources), variable) for spent, resources in slot.lines]

    def solve(self, lengths: Lengths) -> OffloadPolicy | None:
        """The policy with the best fractions."""
        slots = len(self._cost)
        bounded, most = [], []
        for coefficients, constant, slot in self._limits:
            row = np.zeros(_VARIABLES + slots)
            row[:_VARIABLES] = coefficients
            row[_VARIABLES + slot] = -1
            bounded.append(row)
            most.append(-constant)
        room = capacity(self._machine.profile)
        for need in rows(self._shape, self._policy, lengths):
            available = getattr(room, need.tier)
            row = np.zeros(_VARIABLES + slots)
            row[:_VARIABLES] = [c / available for c in (*need.weights, *need.cache, *need.activations)]
            bounded.append(row)
            most.append(1 - need.constant / available)
        whole = np.zeros((3, _VARIABLES + slots))
        for kind in range(3):
            whole[kind, 3 * kind : 3 * kind + 3] = 1
        # of placements that are as fast the one that is highest up
        cost = np.concatenate([np.tile(_HIGHER, 3) * sum(self._cost), self._cost])
        bounds: list[tuple[float, float | None]] = []
        for given in (self._policy.weights, self._policy.cache, self._policy.activations):
            bounds += [(0, 1)] * 3 if given is None else [(f, f) for f in given]
        bounds += [(0, None)] * slots
        found = linprog(cost, np.array(bounded), np.array(most), whole, np.ones(3), bounds, method="highs")
        if not found.success:
            return None
        weights, cache, activations = (_rounded(found.x[3 * kind : 3 * kind + 3]) for kind in range(3))
        policy = self._policy
        return replace(
            policy,
            weights=policy.weights or weights,
            cache=policy.cache or cache,
            activations=policy.activations or activations,
        )

    def _load(self, part: Sublayer) -> _Affine:
        found = [self._layers(weights=corner).load(part) for corner in _CORNERS]
        return _Affine.of(0, found)

    def _unpack(self, part: Sublayer) -> _Affine:
        return _Affine.constant(self._layers().unpack(part))

    def _batch(self, part: Sublayer, works: Sequence[Pass]) -> _Affine:
        at_home = self._layers().batch(part, works)
        cached = [self._layers(cache=corner).batch(part, works) - at_home for corner in _CORNERS]
        moved = [self._layers(activations=corner).batch(part, works) - at_home for corner in _CORNERS]
        return _Affine.constant(at_home) + _Affine.of(1, cached) + _Affine.of(2, moved)

    def _layers(
        self, weights: Fractions = _CORNERS[0], cache: Fractions = _CORNERS[0], activations: Fractions = _CORNERS[0]
    ) -> Layers:
        """Under a placement of corners, in which everything is linear."""
        policy = replace(self._policy, weights=weights, cache=cache, activations=activations)
        return Layers(self._shape, policy, self._machine, self._style)


class _Affine:
    """Seconds of each resource as a linear function of the nine fractions, and a constant."""

    def __init__(self, coefficients: np.ndarray, constant: np.ndarray) -> None:
        self._coefficients = coefficients  # [resources, fractions]
        self._constant = constant

    @classmethod
    def constant(cls, seconds: Seconds) -> _Affine:
        return cls(np.zeros((len(seconds.values), _VARIABLES)), np.array(seconds.values))

    @classmethod
    def of(cls, kind: int, corners: Sequence[Seconds]) -> _Affine:
        """Of one kind's fractions, by what it is where all is in one place."""
        found = cls.constant(Seconds())
        for place, seconds in enumerate(corners):
            found._coefficients[:, 3 * kind + place] = seconds.values
        return found

    def __add__(self, other: _Affine) -> _Affine:
        return _Affine(self._coefficients + other._coefficients, self._constant + other._constant)

    def __mul__(self, times: float) -> _Affine:
        return _Affine(self._coefficients * times, self._constant * times)

    def of_turns(self, resources: Sequence[int]) -> tuple[np.ndarray, float]:
        """Coefficients and constant of the sum of some resources."""
        chosen = list(resources)
        return self._coefficients[chosen].sum(axis=0), float(self._constant[chosen].sum())


def _rounded(fractions: Sequence[float]) -> Fractions:
    """To whole percents of device and host downwards: what is left is where there is most room."""
    device, host = (min(1.0, max(0.0, np.floor(100 * f + 1e-6) / 100)) for f in fractions[:2])
    if fractions[2] < 1e-9:
        host = 1 - device
    return float(device), float(host), float(max(0.0, 1 - device - host))
