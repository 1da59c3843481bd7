"""`harness compare`: whether a run is slower than its base, or an engine slower than another."""

import sys
from pathlib import Path
from typing import Any

import click

from harness.cli.errors import EXIT_FAILED, EXIT_UNDECIDED, say

_FORMATS = ("text", "md", "json", "junit", "gab")


def _fraction(context: click.Context, option: click.Parameter, value: float) -> float:
    """A number between 0 and 1; click's own range would accept NaN."""
    if not 0 < value < 1:
        raise click.BadParameter(f"{value} is not between 0 and 1", context, option)
    return value


@click.command()
@click.argument("dirs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BASE HEAD...")
@click.option("--format", "form", type=click.Choice(_FORMATS), default="text", show_default=True,
              help="gab is for github-action-benchmark.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), help="Write to this file instead of printing.")
@click.option("--metric", default="throughput", show_default=True,
              help="Or another speed or time of the records, such as ttft_p99_s.")  # fmt: skip
@click.option("--aa", "again", multiple=True, type=click.Path(path_type=Path), metavar="DIR",
              help="Another run of BASE's code, which says how far runs differ; may be repeated.")  # fmt: skip
@click.option("--allow", multiple=True, metavar="ITEM",
              help="What may differ between runs: packages, packages.torch, machine.os ...")  # fmt: skip
@click.option("--against", metavar="CELL|ENGINE",
              help="Compare the cells of each DIR with this cell, or this engine's fastest.")  # fmt: skip
@click.option("--alpha", type=float, callback=_fraction, default=0.02, show_default=True,
              help="Two-sided significance level for a whole suite.")  # fmt: skip
@click.option("--margin", type=float, callback=_fraction, default=0.10, show_default=True,
              help="`no change` means that a slowdown of this size is excluded.")  # fmt: skip
def compare(
    dirs: tuple[Path, ...], form: str, out: Path | None, against: str | None, again: tuple[Path, ...], **rules: Any
) -> None:
    """Compare each run directory HEAD with BASE, and say which cells became slower.

    A regression needs a quotient of medians whose interval excludes 1, an effect above max(3 %, twice the A/A noise),
    and an exact Mann-Whitney p that survives Holm over the cells; a cell that newly fails is one as well. The unit is a
    launch: with fewer than five on each side nothing can be decided, and seven are a good number. Run both sides in
    turns (ci/interleave.sh): sides that ran one after the other, such as nightly runs, need several --aa. Launches that
    other processes disturbed are left out.

    \b
    Examples:
      harness compare results/main results/branch
      harness compare results/main results/branch --format md --out comment.md
      harness compare results/monday results/thursday --aa results/tuesday --aa results/wednesday
      harness compare results/cpu_offload --against accelerate

    Exit codes: 0 no regression; 1 a regression; 2 bad usage or records; 5 no regression, but some cells could not be
    decided (inconclusive, or not comparable). With --against a slower cell is not a regression, and 1 is not used.
    """
    from harness.api import HarnessError
    from reports.compare import compare_engines, compare_runs
    from reports.compare_formats import FORMATS
    from reports.records import read_runs
    from reports.render import write
    from reports.speed import Rules

    if against is not None:
        if again or rules["allow"]:
            raise HarnessError("--aa and --allow go with BASE and HEAD, not with --against")
        comparisons = compare_engines(dirs, against, Rules(**rules))
    else:
        if len(dirs) < 2:
            raise HarnessError("name BASE and at least one HEAD, or --against an engine of one run")
        comparisons = compare_runs(dirs[0], dirs[1:], Rules(**rules, again=[read_runs([run]) for run in again]))
    text = FORMATS[form](comparisons)
    if out is None:
        say(text.rstrip("\n"))
    else:
        write(out, text)
        for comparison in comparisons:
            say(comparison.summary, err=True)
    verdicts = {cell.verdict for comparison in comparisons for cell in comparison.cells}
    if "regression" in verdicts:
        sys.exit(EXIT_FAILED)
    sys.exit(EXIT_UNDECIDED if verdicts & {"inconclusive", "not comparable"} or not verdicts else 0)
