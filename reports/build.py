"""Writes report.html, .md, .csv and .xml from run directories; re-exports the package's public functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from reports.flat import to_csv
from reports.junit import cases_of, junit
from reports.optional import optional_packages
from reports.page import Page, page
from reports.rates import with_rates_around
from reports.records import Runs, load_records, read_runs
from reports.render import html_of, is_folder, markdown_of, write
from reports.summary import CellSummary, headline, summary_rows
from reports.timeline import chrome_trace
from reports.vega import Panel, library

__all__ = ["CellSummary", "build", "headline", "load_records", "summary_rows"]


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
    target = out or dirs[0]
    if target.suffix in _FORMATS and not is_folder(target):
        files = {target: _FORMATS[target.suffix]}
    else:
        files = {target / f"report{suffix}": render for suffix, render in _FORMATS.items()}
    content = page(runs, _trends(runs, history) if history else ())
    for path, render in files.items():
        write(path, render(runs, content, cache))
    if target not in files:
        for name, text in chrome_trace(runs.records).items():
            write(target / "traces" / f"{name}.json", text)
    return list(files)


def _trends(runs: Runs, url: str) -> list[Panel]:
    with optional_packages("--history"):
        from reports.history import open_history
        from reports.trend import trend_panels

    history = open_history(url)
    try:
        return trend_panels(history.series({r.fingerprint for r in runs.records}))
    finally:
        history.close()


def _html(_: Runs, content: Page, cache: Path | None) -> str:
    return html_of("report.html", page=content, library=library(cache))


def _markdown(_: Runs, content: Page, __: Path | None) -> str:
    return markdown_of("report.md", page=content)


def _csv(runs: Runs, _: Page, __: Path | None) -> str:
    order = {fingerprint: i for i, fingerprint in enumerate(dict.fromkeys(r.fingerprint for r in runs.records))}
    return to_csv(sorted(with_rates_around(runs.records), key=lambda r: (order[r.fingerprint], r.repeat)))


def _junit(runs: Runs, _: Page, __: Path | None) -> str:
    return junit(cases_of(runs.records))


_FORMATS: dict[str, Callable[[Runs, Page, Path | None], str]] = {
    ".html": _html,
    ".md": _markdown,
    ".csv": _csv,
    ".xml": _junit,
}
