"""Prints the fitted constants, which are written by hand into the profiles and engine_cost_models.yaml."""

import click

from engines.planning import fit
from harness import hardware

PROFILES = ("t4_gcp", "a100_40g")

if __name__ == "__main__":
    for profile in map(hardware.load, PROFILES):
        cells = fit.fitted_cells(profile.name)
        values = fit.fit(profile, cells).values
        click.echo(f"{profile.name}: {len(values)} constants on {len(cells)} cells")
        for path, value in values.items():
            click.echo(f"  {path}: {value:.4g}")
