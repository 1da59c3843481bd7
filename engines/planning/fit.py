"""Fits constants of hardware profiles and engine cost models to published cells; validates by leaving out tables.

fits.yaml names the cells and the constants. A fit is regularised: every constant has a start from a data sheet or from
the engine's code and a prior spread.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.optimize import least_squares

from engines.planning import published
from engines.planning.engine_cost_models import EngineCostModel, engine_cost_models
from engines.planning.published import Cell, Outcome
from harness.api import HardwareProfile

#: Relative standard deviation of a published figure.
_FIGURE_SPREAD = 0.05


@dataclass(frozen=True)
class Constant:
    """A constant to fit, by its path in the profile or as `engine.constant`; those at `same` get the same value.

    start: the prior's median; spread: the standard deviation of its logarithm.
    """

    path: str
    start: float
    spread: float
    source: str
    same: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fitted:
    """A profile and cost models with fitted constants, and these by path."""

    profile: HardwareProfile
    cost_models: Mapping[str, EngineCostModel]
    values: Mapping[str, float]

    def outcomes(self, cells: Sequence[Cell], simulate: bool = True) -> list[Outcome]:
        """The predictions of cells."""
        return published.evaluate(cells, {self.profile.name: self.profile}, self.cost_models, simulate)


@cache
def fitted_constants(hardware: str) -> tuple[Constant, ...]:
    """The constants that are fitted for a hardware profile."""
    entries = yaml.safe_load(Path(published.FITS).read_text())[hardware]["constants"]
    return tuple(Constant(path, **(entry | {"same": tuple(entry.get("same", ()))})) for path, entry in entries.items())


def fitted_cells(hardware: str) -> list[Cell]:
    """The published cells that the profile's fit uses."""
    return [cell for cell in published.cells() if cell.hardware == hardware and cell.fitted and not cell.repeated]


def fit(profile: HardwareProfile, cells: Sequence[Cell], simulate: bool = True) -> Fitted:
    """Fits the profile's constants to some cells, by least squares in logarithms with a soft L1 loss; in virtual time,
    which predicts with them, or else by the closed form."""
    constants = fitted_constants(profile.name)
    start = np.log([constant.start for constant in constants])
    spread = np.array([constant.spread for constant in constants])

    def residuals(x: np.ndarray) -> np.ndarray:
        outcomes = _with_values(profile, constants, np.exp(x)).outcomes(cells, simulate)
        errors = [outcome.error or 0.0 for outcome in outcomes]
        return np.concatenate([np.log1p(errors) / _FIGURE_SPREAD, (x - start) / spread])

    return _with_values(profile, constants, np.exp(least_squares(residuals, start, loss="soft_l1").x))


def held_out(profiles: Mapping[str, HardwareProfile]) -> list[dict[str, Any]]:
    """By published table, as plain data: errors on all its cells of constants that were fitted on other tables only.

    Medians and the largest of absolute relative errors, beside the median with the shipped constants.
    """
    rows = []
    for name, table, others, outcomes in held_out_outcomes(profiles):
        shipped = [abs(o.error or 0.0) for o in published.evaluate([o.cell for o in outcomes], profiles)]
        without = [abs(o.error or 0.0) for o in outcomes]
        rows.append({
            "hardware": name, "table": table, "cells": len(outcomes), "fitted on others": others,
            "median error": statistics.median(without), "largest": max(without),
            "median with all": statistics.median(shipped),
        })  # fmt: skip
    return rows


def held_out_outcomes(profiles: Mapping[str, HardwareProfile]) -> Iterator[tuple[str, str, int, Sequence[Outcome]]]:
    """Each published table with its hardware, predicted by constants that were fitted on so many cells of others."""
    for name in yaml.safe_load(published.FITS.read_text()):
        of_fit = fitted_cells(name)
        all_cells = [c for c in published.cells() if c.hardware == name and c.figure and not c.repeated]
        for table in dict.fromkeys(cell.paper_table for cell in all_cells):
            cells = [cell for cell in all_cells if cell.paper_table == table]
            others = [cell for cell in of_fit if cell.paper_table != table]
            yield name, table, len(others), fit(profiles[name], others).outcomes(cells)


def _with_values(profile: HardwareProfile, constants: Sequence[Constant], values: Sequence[float]) -> Fitted:
    """The profile and the cost models with these constants."""
    cost_models = dict(engine_cost_models())
    for constant, value in zip(constants, map(float, values), strict=True):
        for path in (constant.path, *constant.same):
            owner, _, name = path.partition(".")
            if owner in cost_models:
                cost_models[owner] = _replaced(cost_models[owner], [name], value)
            else:
                profile = _replaced(profile, path.split("."), value)
    return Fitted(profile, cost_models, {c.path: float(v) for c, v in zip(constants, values, strict=True)})


def _replaced(part: Any, path: list[str], value: float) -> Any:
    """A dataclass or mapping with the value at `path` replaced."""
    name, *rest = path
    if isinstance(part, dict):
        return {**part, name: value}
    return replace(part, **{name: _replaced(getattr(part, name), rest, value) if rest else value})
