"""Runs of suites: launches or predicts the cells, and reads what earlier runs recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.api import HarnessError, RunRecord
from harness.common.files import default_cache
from offload_harness.frames import frame_of, html_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Run:
    """A run's records, and the folder `out` that they are in. A notebook shows its headline and summary."""

    records: Sequence[RunRecord]
    out: Path

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each launch, with the columns of report.csv ([what they are](records.md#columns)).

        Units are in the names; what was not measured is missing.
        """
        from reports.flat import rows

        return frame_of(rows(self.records))

    @property
    def failed(self) -> list[RunRecord]:
        """Launches that did not end as their suite expects."""
        return [record for record in self.records if record.status != record.spec.expect]

    def __str__(self) -> str:
        from reports.terminal import summary_text

        return summary_text(self.records)

    def _repr_html_(self) -> str:
        from reports.terminal import summary_parts

        return html_of(summary_parts(self.records))


def run_suite(
    suite: str | Path, *, set: Mapping[str, Any] | None = None, out: str | Path | None = None,
    engines: Sequence[str] = (), cells: Sequence[str] = (), launcher: str | None = None, fresh: bool = False,
    simulate: bool = False, hardware: str | None = None, data_dir: str | Path | None = None, report: bool = True,
    extra_tries: int = 2, cache_dir: str | Path | None = None, progress: bool = True,
) -> Run:  # fmt: skip
    """Runs a suite, a file or the name of a shipped one, as `harness run` does, and returns its records.

    `set` overrides keys in every cell: `{"repeats": 1, "policy.schedule": "row"}`. `out` is the run directory,
    results/<suite name> by default; a run that was interrupted there goes on. `engines` and `cells` select, all by
    default. With `simulate` every cell is predicted for `hardware` instead. A cell that fails is a record, in
    `Run.failed`, and no exception. `report=False` leaves report.html and its like out.

    Raises HarnessError for a broken suite, for names that it does not have, and for a machine that is too small for it.
    """
    from harness.batch.progress import make_job_progress
    from harness.run.measure import measure, predict
    from harness.run.options import RunOptions, select
    from harness.run.progress import QuietProgress, make_progress
    from reports.build import build

    options = RunOptions(
        suite=str(suite), out=_path(out), engines=tuple(engines), names=tuple(cells),
        overrides=tuple(_override(key, value) for key, value in (set or {}).items()), shard=None,
        launcher=launcher, fresh=fresh, simulate=simulate, hardware=hardware, data_dir=_path(data_dir),
        no_report=not report, extra_tries=extra_tries, cache=_path(cache_dir) or default_cache(),
    )  # fmt: skip
    selection = select(options)
    if simulate:
        with make_job_progress() as shown:
            done = predict(options, selection, lambda n, of: shown.advance("predicting cells", n, of))
    else:
        done = measure(options, selection, make_progress() if progress else QuietProgress())
    if report:
        build([done.out], cache=options.cache)
    return Run(done.records, done.out)


def read_run(folder: str | Path) -> Run:
    """The records of an earlier run. Raises HarnessError for a folder without records."""
    from reports.records import load_records

    path = path_of(folder)
    return Run(load_records([path]), path)


def path_of(given: str | Path) -> Path:
    """The path. Raises HarnessError for one that no file can have."""
    if "\0" in str(given):
        raise HarnessError(f"{str(given)!a}: no file has such a name")
    return Path(given)


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else path_of(given)


def _override(key: str, value: Any) -> str:
    """A setting as `harness run --set` takes it."""
    try:
        return f"{key}={json.dumps(value)}"
    except (TypeError, ValueError) as exc:
        raise HarnessError(f"set: {key}: expected what a suite can hold: {exc}") from None
