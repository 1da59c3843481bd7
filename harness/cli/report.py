"""`harness report`: writes reports from the records of runs."""

import gc
from pathlib import Path

import click

from harness.common.files import default_cache


@click.command()
@click.argument("dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path),
              help="Folder for the report, or one file .html, .md, .csv or .xml [default: the first DIR].")  # fmt: skip
@click.option("--history", "url", metavar="URL", help="Also show the cells' past from this history (harness history).")
def report(dirs: tuple[Path, ...], out: Path | None, url: str | None) -> None:
    """Write report.html, report.md, report.csv and report.xml (JUnit) from the records in DIRS.

    \b
    Examples:
      harness report results/quickstart
      harness report results/* --out all.html
      harness report results/nightly --history sqlite:///results/history.db
    """
    from reports.build import build

    gc.disable()  # records are millions of small objects without cycles, and the process ends with them
    for path in build(list(dirs), out, url, default_cache()):
        click.echo(path)
