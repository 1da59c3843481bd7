"""`harness history`: records over time, and where a cell's speed changed. Imports inside, as in cli.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.cli.errors import one_line_errors

if TYPE_CHECKING:
    from reports.history import History, Series

_URL = "sqlite:///results/history.db"


def _db(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--db", default=_URL, show_default=True, envvar="HARNESS_HISTORY",
                        help="Any URL that SQLAlchemy takes; also $HARNESS_HISTORY.")(function)  # fmt: skip


def _which(function: Callable[..., Any]) -> Callable[..., Any]:
    function = click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)
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
      harness report results/nightly --history sqlite:///results/history.db
    """


@history.command()
@click.argument("dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@_db
def add(dirs: tuple[Path, ...], db: str) -> None:
    """Append the records of run directories DIRS; those already there stay as they are.

    \b
    Examples:
      harness history add results/nightly
      harness history add results/* --db postgresql+psycopg://user@host/benchmarks
    """
    with one_line_errors():
        from reports.records import load_records

        records = [load_records([folder]) for folder in dirs]  # all of them can be read before any is added
        store = _open(db, make=True)
        counts = [store.add(some) for some in records]
        added, known = (sum(c) for c in zip(*counts, strict=True))
        click.echo(f"{store.url}: {added} added, {known} already there")


@history.command()
@_which
@_db
def show(cell: str, suite: str, as_json: bool, db: str) -> None:
    """List cells and their commits.

    \b
    Example:
      harness history show --suite ci_smoke
    """
    with one_line_errors():
        from harness.api import to_json
        from reports.text import median, number
        from reports.trend import short

        for series in _series(db, cell, suite):
            if as_json:
                click.echo(json.dumps(to_json(series)))
                continue
            click.echo(f"{series.suite} {series.cell} ({series.workload}; machine {series.machine})")
            for point in series.points:
                middle = median(point.speeds)
                speed = "no figure" if middle is None else f"{number(middle)} tok/s of {len(point.speeds)}"
                failed = f", {point.failed} failed" if point.failed else ""
                click.echo(f"  {point.started_at}  {short(point.commit)}  {speed}{failed}")


@history.command()
@_which
@_db
def trend(cell: str, suite: str, as_json: bool, db: str) -> None:
    """Say where the level of speed changed over commits (PELT), a table for each cell and machine.

    \b
    Example:
      harness history trend --cell offload-sweep
    """
    with one_line_errors():
        from harness.api import to_json
        from reports.terminal import plain_text
        from reports.text import plural
        from reports.trend import FEWEST, changes, short, trend_table

        for series in _series(db, cell, suite):
            found = changes(series)
            if as_json:
                known = {"cell": series.cell, "fingerprint": series.fingerprint, "machine": series.machine}
                click.echo(json.dumps(known | {"commits": len(series.points), "changes": to_json(found)}))
                continue
            few = f"too few commits to tell (at least {FEWEST} are needed)"
            none = few if len(series.points) < FEWEST else "no change"
            words = ", ".join(f"{short(c.commit)} {c.direction} ({c.ratio:.3f})" for c in found)
            title = f"{series.cell}: {words or none} over {plural(len(series.points), 'commit')}"
            click.echo(plain_text(title, trend_table(series, found), ()))


def _open(url: str, make: bool = False) -> History:
    """The store. Only what adds records makes a file that is not there."""
    from reports.optional import optional_packages

    with optional_packages("the history"):
        from reports.history import open_history
    return open_history(url, make)


def _series(db: str, cell: str, suite: str) -> list[Series]:
    found = _open(db).series(cell=cell, suite=suite)
    if not found:
        click.echo("nothing is recorded of that", err=True)
    return found
