"""Prints the constants that engines/planning/fit.py fits, or the fit's leave-one-out errors as a Markdown table.

`python docs/model/fit.py` prints constants, to be written into the profiles and engine_cost_models.yaml by hand;
`python docs/model/fit.py --leave-one-out` prints the table of docs/model.md.
"""

import statistics
import sys

import click

from engines.planning import fit
from engines.planning.published import Outcome
from harness import hardware

PROFILES = ("t4_gcp", "a100_40g")


def print_constants(profile: hardware.HardwareProfile) -> None:
    cells = fit.fitted_cells(profile.name)
    values = fit.fit(profile, cells).values
    click.echo(f"{profile.name}: {len(values)} constants on {len(cells)} cells")
    for path, value in values.items():
        click.echo(f"  {path}: {value:.3g}")


def print_errors(profile: hardware.HardwareProfile) -> None:
    """One row a cell, and the medians."""
    rows = fit.leave_one_out(profile)
    for cell, with_it, without in rows:
        click.echo(f"| {profile.name} | {cell.label} | {cell.figure} | {columns(with_it)} | {columns(without)} |")
    with_all, with_others = (statistics.median(abs(row[i].error or 0.0) for row in rows) for i in (1, 2))
    click.echo(f"| {profile.name} | median of {len(rows)} | | | {with_all:.1%} | | {with_others:.1%} |")


def columns(outcome: Outcome) -> str:
    return f"{outcome.predicted:.3g} | {outcome.error or 0.0:+.1%}"


if __name__ == "__main__":
    profiles = [hardware.load(name) for name in PROFILES]
    if "--leave-one-out" in sys.argv[1:]:
        click.echo("| hardware | cell | published | all cells | error | without it | error |")
        click.echo("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for profile in profiles:
        (print_errors if "--leave-one-out" in sys.argv[1:] else print_constants)(profile)
