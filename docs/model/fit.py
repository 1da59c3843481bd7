"""Prints the constants that engines/planning/fit.py fits, or the fit's leave-one-out errors as a Markdown table.

`python docs/model/fit.py` prints constants, to be written into the profiles and engine_cost_models.yaml by hand;
`python docs/model/fit.py --leave-one-out` prints the table of docs/model.md.
"""

import statistics
import sys

from engines.planning import fit
from engines.planning.published import Outcome
from harness import hardware

PROFILES = ("t4_gcp", "a100_40g")


def main() -> None:
    profiles = [hardware.load(name) for name in PROFILES]
    if "--leave-one-out" in sys.argv[1:]:
        sys.stdout.write("| hardware | cell | published | all cells | error | without it | error |\n")
        sys.stdout.write("| --- | --- | ---: | ---: | ---: | ---: | ---: |\n")
    for profile in profiles:
        cells = fit.fitted_cells(profile.name)
        if "--leave-one-out" in sys.argv[1:]:
            validate(profile)
            continue
        result = fit.fit(profile, cells)
        sys.stdout.write(f"{profile.name}: {len(result.values)} constants on {len(cells)} cells\n")
        for path, value in result.values.items():
            sys.stdout.write(f"  {path}: {value:.3g}\n")


def validate(profile: hardware.HardwareProfile) -> None:
    """One row a cell, and the medians."""
    rows = fit.leave_one_out(profile)
    for cell, with_it, without in rows:
        sys.stdout.write(f"| {profile.name} | {cell.label} | {cell.figure} | {column(with_it)} | {column(without)} |\n")
    medians = [
        f"{statistics.median(abs(o.error or 0.0) for o in side):.1%}" for side in list(zip(*rows, strict=True))[1:]
    ]
    sys.stdout.write(f"| {profile.name} | median of {len(rows)} | | | {medians[0]} | | {medians[1]} |\n")


def column(outcome: Outcome) -> str:
    return f"{outcome.predicted:.3g} | {outcome.error or 0.0:+.1%}"


if __name__ == "__main__":
    main()
