"""`harness calibrate`: measures this host."""

import os
from pathlib import Path

import click

from harness import builtin
from harness.cli.errors import say, say_json
from harness.cli.options import cache_option, json_option
from harness.cli.tables import print_rows
from harness.common.units import with_unit


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="The profile to write [default: the local one].")
@click.option("--quick", is_flag=True,
              help="Fewer rounds, in under a minute (the first time also the time to compile kernels).")  # fmt: skip
@click.option(
    "--hire", type=click.FloatRange(0, min_open=True), metavar="DOLLARS", help="What an hour of this machine costs."
)
@click.option("--power", type=click.FloatRange(0, min_open=True), metavar="WATTS", help="What it draws while it works.")
@click.option("--electricity", type=click.FloatRange(0, min_open=True), metavar="DOLLARS", help="Price of a kWh.")
@json_option("Print the profile as JSON.")
@cache_option("The disk to measure, and compiled kernels")
def calibrate(out: Path | None, quick: bool, as_json: bool, cache: Path, **prices: float | None) -> None:
    """Measure this host's memory, disk and arithmetic for plans. Run nothing else meanwhile.

    \b
    Examples:
      harness calibrate                    takes a few minutes; `harness plan` uses it from then on
      harness calibrate --quick --out here.yaml
      harness calibrate --power 250 --electricity 0.2       plans and reports tell tokens per dollar and joule
    """
    os.environ |= builtin.ENGINES["offload"].env  # as the engine's own process has them; torch is not loaded yet
    from harness.api import Prices, to_json
    from harness.common.locks import in_use
    from harness.hardware import calibration

    with in_use(cache):
        profile, path = calibration.calibrate(
            out, quick, cache, lambda what: say(f"measuring {what}", err=True), Prices(**prices)
        )
    if as_json:
        say_json(to_json(profile))
    else:
        print_rows(
            [
                {"rate": rate.name} | {name: with_unit(getattr(rate, name), rate.unit)
                                       for name in ("median", "lowest", "highest")}
                for rate in calibration.rates(profile)
            ]
        )  # fmt: skip
        if noisy := [rate.name for rate in calibration.rates(profile) if rate.noisy]:
            varied = f"{', '.join(noisy)} varied by more than {calibration.NOISE:g} times"
            say(f"\nnoisy: {varied}; measure again with nothing else running", err=True)
    say(f"profile: {path}", err=True)
