"""Writes report.html, .md, .csv and .xml from run directories."""

from collections.abc import Callable, Sequence
from pathlib import Path

from reports.flat import to_csv
from reports.junit import cases_of, junit
from reports.optional import optional_packages
from reports.page import page
from reports.records import Runs, read_runs
from reports.render import html_of, is_folder, markdown_of, write
from reports.timeline import chrome_trace
from reports.vega import Panel, library


def build(
    dirs: Sequence[Path], out: Path | None = None, history: str | None = None, cache: Path | None = None
) -> list[Path]:
    """Writes the report on run directories `dirs` and returns the files written.

    `out` is a folder for all four formats and, below `traces`, a Chrome trace of each cell that has one; by default the
    first run directory. Or it is a file whose suffix (.html, .md, .csv, .xml) selects the format. `history`: URL of a
    store whose trends of these cells the report shows. `cache`: folder that keeps the bundled Vega library. Raises
    HarnessError for unreadable records and for a target that cannot be written; a failed write keeps the earlier file.
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
        files = {target / f"report{suffix}": render for suffix, render in formats.items()}
    for path, render in files.items():
        write(path, render())
    if target not in files:
        for name, text in chrome_trace(runs.records).items():
            write(target / "traces" / f"{name}.json", text)
    return list(files)


def _trends(runs: Runs, url: str) -> list[Panel]:
    with optional_packages("--history"):
        from reports.history import open_history
        from reports.trend import trend_panel

    history = open_history(url)
    try:
        series = history.series({r.fingerprint for r in runs.records})
        return [panel for each in series if (panel := trend_panel(each))]
    finally:
        history.close()
