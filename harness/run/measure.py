"""A run from its requirements to its records: launches, or predictions in their place."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.api import HarnessError, RunRecord
from harness.common.locks import in_use
from harness.common.system import require_linux
from harness.hardware.requirements import check_requirements
from harness.run.options import RunOptions, Selection
from harness.run.progress import Progress
from harness.run.runner import Runner
from harness.run.simulation import simulate
from harness.run.store import RECORDS


class UnmetRequirements(HarnessError):
    """The machine is too small for a suite; the text names what it lacks."""


@dataclass(frozen=True)
class Measured:
    """The last record of every launch, and the folder that they are in."""

    records: list[RunRecord]
    out: Path

    @property
    def failed(self) -> list[RunRecord]:
        """Launches that did not end as their suite expects."""
        return [record for record in self.records if record.status != record.spec.expect]


def run_folder(options: RunOptions, selection: Selection) -> Path:
    """Where a run's records are."""
    suffix = f"-{Path(options.hardware or 'local').stem}-simulated" if options.simulate else ""
    return options.out or Path("results") / f"{selection.suite.name}{suffix}"


def measure(options: RunOptions, selection: Selection, progress: Progress) -> Measured:
    """Runs the selected cells.

    Raises UnmetRequirements for a machine that is too small, HarnessError for what stops the whole run, and
    KeyboardInterrupt after recording the cell in flight.
    """
    suite, out = selection.suite, run_folder(options, selection)
    require_linux("harness run")
    if options.data_dir is not None and not options.data_dir.is_dir():
        raise HarnessError(f"--data-dir {options.data_dir}: no such folder")
    if lacking := check_requirements(suite, options.cache, resuming=(out / RECORDS).exists()):
        raise UnmetRequirements(f"this machine does not meet {suite.name}: {'; '.join(lacking)}")
    with progress, in_use(options.cache):
        runner = Runner(selection, out, options.cache, progress, options.data_dir, options.extra_tries)
        records = runner.run(options.fresh)
    return Measured(records, out)


def predict(options: RunOptions, selection: Selection, report: Callable[[int, int], None]) -> Measured:
    """Predicts the selected cells for `options.hardware`; `report` is told how many are done, and of how many."""
    out = run_folder(options, selection)
    return Measured(simulate(selection, out, options.hardware or "local", options.cache, report), out)
