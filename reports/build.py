"""Writes report.html, report.md and report.csv from run directories; the package's public functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2

from harness.api import HarnessError
from reports.flat import to_csv
from reports.page import page
from reports.rates import with_rates_around
from reports.records import Runs, load_records, read_runs
from reports.summary import CellSummary, headline, summary_rows
from reports.text import clean, markdown
from reports.timeline import chrome_trace

__all__ = ["CellSummary", "build", "headline", "load_records", "summary_rows"]

TEMPLATES = Path(__file__).parent / "templates"


def build(dirs: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Writes the report on run directories `dirs` and returns the files written.

    `out` is a folder for all three formats (made if missing; by default the first run directory) and, below
    `traces`, for the Chrome trace of each cell that has one; or one file whose suffix (.html, .md, .csv) picks
    the format. Raises HarnessError for unreadable records and for a target that cannot be written; an earlier
    report is replaced only by a complete new one.
    """
    runs = read_runs(dirs)
    target = out or dirs[0]
    if target.suffix in _FORMATS and not target.is_dir():
        files = {target: _FORMATS[target.suffix]}
    else:
        files = {target / f"report{suffix}": render for suffix, render in _FORMATS.items()}
    for path, render in files.items():
        _write(path, render(runs))
    if target not in files:
        for name, text in chrome_trace(runs.records).items():
            _write(target / "traces" / f"{name}.json", text)
    return list(files)


def _html(runs: Runs) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean(value) if type(value) is str else value,
    )
    return environment.get_template("report.html").render(page=page(runs))


def _markdown(runs: Runs) -> str:
    # Autoescape knows only HTML; `finalize` escapes every expression for Markdown in the same way.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=False,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=markdown,
    )
    return environment.get_template("report.md").render(page=page(runs))


def _csv(runs: Runs) -> str:
    order = {fingerprint: i for i, fingerprint in enumerate(dict.fromkeys(r.fingerprint for r in runs.records))}
    return to_csv(sorted(with_rates_around(runs.records), key=lambda r: (order[r.fingerprint], r.repeat)))


_FORMATS: dict[str, Callable[[Runs], str]] = {".html": _html, ".md": _markdown, ".csv": _csv}


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8", newline="\n")
        part.replace(path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            part.unlink()
        raise HarnessError(f"cannot write {path}: {exc.strerror or exc}; choose another place with --out") from exc
