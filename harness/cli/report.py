"""`harness report`: writes reports from the records of runs."""

import gc
from pathlib import Path

import click

from harness.cli.errors import say
from harness.common.files import default_cache


@click.command()
@click.argument("dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path),
              help="Folder for the report, or one file .html, .md, .csv or .xml [default: the first DIR].")  # fmt: skip
@click.option("--history", "url", metavar="URL", help="Also show the cells' past from this history (harness history).")
@click.option("--side-by-side", is_flag=True, help="Write one page that shows two runs beside each other.")
def report(dirs: tuple[Path, ...], out: Path | None, url: str | None, side_by_side: bool) -> None:
    """Write report.html, report.md, report.csv and report.xml (JUnit) from the records in DIRS.

    \b
    Examples:
      harness report results/quickstart
      harness report results/* --out all.html
      harness report results/main results/branch --side-by-side --out both.html
      harness report results/nightly --history sqlite:///results/history.db
    """
    from harness.api import HarnessError
    from reports.build import build, build_side_by_side

    gc.disable()  # records are millions of small objects without cycles, and the process ends with them
    if side_by_side:
        if url is not None:
            raise HarnessError("--history goes with a report on runs, not with --side-by-side")
        say(str(build_side_by_side(dirs, out, default_cache())))
        return
    for path in build(list(dirs), out, url, default_cache()):
        say(str(path))
