"""Fits the constants of hardware profiles and of engines' styles on the published cells named in published.FITTED.

Constants start from data sheets and from what the paper states; how far a fit may carry them is their spread, as a
standard deviation of the logarithm. Prints what it finds, to be written into the profiles and styles by hand.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from engines.planning import closed_form_planner, published
from engines.planning.engine_cost_models import ENGINE_COST_MODELS
from harness import hardware
from harness.api import HardwareProfile

#: A figure is trusted to so much of itself.
_TRUST = 0.05


@dataclass(frozen=True)
class Constant:
    """A figure to fit, by its path in the profile, or in styles; equal to it are those at `same`."""

    path: str
    start: float
    spread: float
    same: tuple[str, ...] = ()


T4 = (
    Constant("device.flops.1024", 20.6e12, 0.1),  # table 8: 2220 s for the prefill of 256 x 512 tokens of OPT-175B
    Constant("device.bandwidth", 260e9, 0.1),  # data sheet: 320e9; copies reach four fifths
    Constant("link.h2d", 12e9, 0.1, ("link.d2h",)),  # PCIe 3 x16
    Constant("link.h2d_pageable", 4.5e9, 0.5, ("link.d2h_pageable",)),
    Constant("host.attention.16", 11e9, 0.5),
    Constant("host.attention_call_s", 2e-6, 1.5),
    Constant("disk.read", 2.65e9, 0.1),  # four local NVMe disks, as 1.5 TB are; the paper's 1.6e9 is one stream's
    Constant("flexgen_ref.uncached_share", 0.6, 0.5),
    Constant("flexgen_ref.slot_s", 2e-4, 1.5, ("accelerate.slot_s", "deepspeed_zero.slot_s")),
    Constant("flexgen_ref.unpack_bytes", 4, 1.0),
    Constant("flexgen_ref.cache_bytes", 38, 0.7),
    Constant("flexgen_ref.packed_load", 1.5e9, 0.7),
    Constant("deepspeed_zero.link_share", 0.7, 0.4),
)
A100 = (
    Constant("device.flops.1024", 200e12, 0.2),  # data sheet: 312e12
    Constant("device.bandwidth", 1.3e12, 0.1),  # data sheet: 1.555e12
    Constant("link.h2d", 24e9, 0.1, ("link.d2h",)),  # PCIe 4 x16
    Constant("link.h2d_pageable", 10e9, 0.5, ("link.d2h_pageable",)),
    Constant("host.attention.16", 17e9, 0.5),
    Constant("host.attention_call_s", 5e-6, 1.0),
    Constant("lm_offload.unpack_bytes", 45, 0.5),
    Constant("lm_offload.cache_bytes", 80, 0.7),
)


def main() -> None:
    """`python docs/model/fit.py [t4_gcp|a100_40g]`."""
    for name, constants in (("t4_gcp", T4), ("a100_40g", A100)):
        if len(sys.argv) == 1 or name in sys.argv[1:]:
            fit(name, constants)


def fit(name: str, constants: tuple[Constant, ...]) -> None:
    """Prints the constants of one profile and of the engines that ran there."""
    profile = hardware.load(name)
    cells = [c for c in published.cells() if c.hardware == name and c.fitted and not c.repeated and c.figure]
    start = np.log([c.start for c in constants])
    spread = np.array([c.spread for c in constants])

    def residuals(x: Any) -> Any:
        with_constants = _profile(profile, constants, np.exp(x))
        errors = [o.error or 0.0 for o in published.evaluate(cells, {name: with_constants})]
        return np.concatenate([np.log1p(errors) / _TRUST, (x - start) / spread])

    found = least_squares(residuals, start, loss="soft_l1")
    sys.stdout.write(f"{name}: {len(cells)} cells\n")
    for constant, value in zip(constants, np.exp(found.x), strict=True):
        sys.stdout.write(f"  {constant.path}: {value:.3g}\n")


def _profile(profile: HardwareProfile, constants: tuple[Constant, ...], values: Any) -> HardwareProfile:
    """The profile with other constants; those of styles are put into ENGINE_COST_MODELS."""
    for constant, value in zip(constants, values, strict=True):
        for path in (constant.path, *constant.same):
            head, *rest = path.split(".")
            if head in ENGINE_COST_MODELS:
                closed_form_planner.ENGINE_COST_MODELS = {
                    **closed_form_planner.ENGINE_COST_MODELS,
                    head: dataclasses.replace(closed_form_planner.ENGINE_COST_MODELS[head], **{rest[0]: float(value)}),
                }
            else:
                profile = _with(profile, [head, *rest], float(value))
    return profile


def _with(part: Any, path: list[str], value: float) -> Any:
    if isinstance(part, dict):
        return {**part, path[0]: value}
    if len(path) == 1:
        return dataclasses.replace(part, **{path[0]: value})
    return dataclasses.replace(part, **{path[0]: _with(getattr(part, path[0]), path[1:], value)})


if __name__ == "__main__":
    main()
