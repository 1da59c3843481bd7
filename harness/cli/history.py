"""`harness history`: records over time, and where a cell's speed changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.errors import say, say_json
from harness.cli.options import json_option

if TYPE_CHECKING:
    from reports.history import History, Series

_URL = "sqlite:///results/history.db"

_db_option = click.option("--db", default=_URL, show_default=True, envvar="HARNESS_HISTORY",
                          help="Any URL that SQLAlchemy takes; also $HARNESS_HISTORY.")  # fmt: skip


def _filter_options(function: Callable[..., Any]) -> Callable[..., Any]:
    function = json_option()(function)
    function = click.option("--suite", default="", help="Only cells of this suite.")(function)
    return click.option("--cell", default="", help="Only this cell.")(function)


@click.group()
def history() -> None:
    """Keep records over time and say where a cell's speed changed.

    \b
    Examples:
      harness history add results/nightly
      harness history show --suite ci_smoke
      harness history trend --cell offload-sweep
      harness history publish site
      harness report results/nightly --history sqlite:///results/history.db
    """


@history.command()
@click.argument("dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--subject", default="", metavar="NAME@COMMIT", envvar="HARNESS_SUBJECT",
              help="What was measured, where it is not this harness's commit; also $HARNESS_SUBJECT.")  # fmt: skip
@_db_option
def add(dirs: tuple[Path, ...], subject: str, db: str) -> None:
    """Append the records of run directories DIRS; those already there stay as they are.

    A project that measures an engine of its own gives the engine's name and commit as --subject: the trend is then
    over those.

    \b
    Examples:
      harness history add results/nightly
      harness history add results/nightly --subject my-engine@$(git rev-parse HEAD)
      harness history add results/* --db postgresql+psycopg://user@host/benchmarks
    """
    from reports.records import load_records

    records = [load_records([folder]) for folder in dirs]  # read all of them before any is added
    store = _open(db, make=True)
    counts = [store.add(of_run, subject) for of_run in records]
    added, known = (sum(c) for c in zip(*counts, strict=True))
    say(f"{store.url}: {added} added, {known} already there")


@history.command()
@_filter_options
@_db_option
def show(cell: str, suite: str, as_json: bool, db: str) -> None:
    """List cells with their commits and speeds.

    \b
    Example:
      harness history show --suite ci_smoke
    """
    from harness.api import to_json
    from reports.text import median, number
    from reports.trend import short

    for series in _series(db, cell, suite):
        if as_json:
            say_json(to_json(series))
            continue
        say(f"{series.suite} {series.title} ({series.workload}; machine {series.machine})")
        for point in series.points:
            middle = median(point.speeds)
            speed = "no figure" if middle is None else f"{number(middle)} tok/s of {len(point.speeds)}"
            failed = f", {point.failed} failed" if point.failed else ""
            say(f"  {point.started_at}  {short(point.commit)}  {speed}{failed}")


@history.command()
@_filter_options
@_db_option
def trend(cell: str, suite: str, as_json: bool, db: str) -> None:
    """Say where the level of speed changed over commits (PELT), in one table per cell and machine.

    \b
    Example:
      harness history trend --cell offload-sweep
    """
    from harness.api import to_json
    from reports.terminal import plain_text
    from reports.text import plural
    from reports.trend import FEWEST, changes, short, trend_table

    for series in _series(db, cell, suite):
        points = changes(series)
        if as_json:
            known = {name: getattr(series, name) for name in ("cell", "subject", "fingerprint", "machine")}
            say_json(known | {"commits": len(series.points), "changes": to_json(points)})
            continue
        few = f"too few commits to tell (at least {FEWEST} are needed)"
        none = few if len(series.points) < FEWEST else "no change"
        words = ", ".join(f"{short(c.commit)} {c.direction} ({c.ratio:.3f})" for c in points)
        title = f"{series.title}: {words or none} over {plural(len(series.points), 'commit')}"
        say(plain_text([title, trend_table(series, points)]))


@history.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--cell", default="", help="Only this cell.")
@click.option("--suite", default="", help="Only cells of this suite.")
@_db_option
def publish(folder: Path, cell: str, suite: str, db: str) -> None:
    """Write the history as static pages into FOLDER: index.html with every cell, and a page of trends a suite.

    \b
    Example:
      harness history publish site
    """
    from harness.api import HarnessError
    from harness.common.files import default_cache
    from reports.publish import publish as write_pages
    from reports.vega import library

    series = _open(db).series(cell=cell, suite=suite)
    if not series:
        raise HarnessError("nothing is recorded of these cells: `harness history add DIR` adds a run")
    for path in write_pages(series, folder, library(default_cache())):
        say(str(path))


def _open(url: str, make: bool = False) -> History:
    """Opens the store; `make` creates a file that does not exist."""
    from reports.optional import optional_packages

    with optional_packages("the history"):
        from reports.history import open_history
    return open_history(url, make)


def _series(db: str, cell: str, suite: str) -> list[Series]:
    series = _open(db).series(cell=cell, suite=suite)
    if not series:
        say("nothing is recorded of these cells", err=True)
    return series
