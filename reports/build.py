"""Writes report.html, .md, .csv and .xml from run directories."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.api import HarnessError
from harness.common.files import inside
from reports.flat import to_csv
from reports.junit import cases_of, junit
from reports.optional import optional_packages
from reports.page import page
from reports.records import Runs, read_runs
from reports.render import html_of, is_folder, markdown_of, write
from reports.side_by_side import side_by_side
from reports.timeline import chrome_trace
from reports.vega import Panel, library


def build(
    dirs: Sequence[Path], out: Path | None = None, history: str | None = None, cache: Path | None = None
) -> list[Path]:
    """Writes the report on run directories `dirs` and returns the files written.

    `out` is a folder for all four formats and, below `traces`, a Chrome trace of each cell that has one; by default the
    first run directory. Or it is a file whose suffix (.html, .md, .csv, .xml) selects the format. `history`: URL of a
    store whose trends of these cells the report shows. `cache`: folder that keeps the bundled Vega library. Raises
    HarnessError for unreadable records and for a target that cannot be written, such as a link in a folder that leads
    out of it; a failed write keeps the earlier file.
    """
    runs = read_runs(dirs)
    content = page(runs, _trends(runs, history) if history else ())
    formats: dict[str, Callable[[], str]] = {
        ".html": lambda: html_of("report.html", page=content, library=library(cache)),
        ".md": lambda: markdown_of("report.md", page=content),
        ".csv": lambda: to_csv(runs.records),
        ".xml": lambda: junit(cases_of(runs.records)),
    }
    target = out or dirs[0]
    if target.suffix in formats and not is_folder(target):
        files = {target: formats[target.suffix]}
    else:
        files = {inside(target, f"report{suffix}"): render for suffix, render in formats.items()}
    for path, render in files.items():
        write(path, render())
    if target not in files:
        for name, text in chrome_trace(runs.records).items():
            write(inside(target, f"traces/{name}.json"), text)
    return list(files)


def build_side_by_side(dirs: Sequence[Path], out: Path | None = None, cache: Path | None = None) -> Path:
    """Writes the page that shows two runs beside each other, and returns its path.

    `out`: an .html file, or a folder for side_by_side.html; by default the second run directory. Raises HarnessError as
    `build`, for other than two directories, and for a file of another suffix.
    """
    content = side_by_side(dirs)
    target = out or dirs[1]
    if is_folder(target) or not target.suffix:
        target = inside(target, "side_by_side.html")
    if target.suffix != ".html":
        raise HarnessError(f"--side-by-side writes a page: name an .html file or a folder with --out, not {target}")
    write(target, html_of("side_by_side.html", page=content, library=library(cache)))
    return target


def _trends(runs: Runs, url: str) -> list[Panel]:
    with optional_packages("--history"):
        from reports.history import open_history
        from reports.trend import trend_panel

    with contextlib.closing(open_history(url)) as history:
        series = history.series({r.fingerprint for r in runs.records})
        return [panel for one in series if (panel := trend_panel(one))]
