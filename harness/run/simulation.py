"""`harness run --simulate`: a suite's cells on a machine that is not here, as records beside those of runs."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from harness import hardware, registry
from harness.api import RunRecord, RunSpec
from harness.run.records import RecordBuilder
from harness.run.store import Store, write_suite_copy


def simulate(
    cells: Sequence[RunSpec],
    suite_file: Path,
    out: Path,
    name: str,
    cache: Path,
    command: str,
    report: Callable[[int, int], None],
) -> list[RunRecord]:
    """Predicts every cell once for the hardware `name` and writes the records; earlier ones are set aside.

    `report` is told how many cells are done, and of how many.

    Raises HarnessError for unknown hardware, and for a folder that cannot be written.
    """
    profile = hardware.load(name, cache)
    store, builder = Store(out), RecordBuilder(command, {})
    with closing(store):
        store.open(fresh=True)
        write_suite_copy(suite_file, out)
        builder.collect_provenance()
        records = []
        for i, cell in enumerate(cells):
            report(i, len(cells))
            prediction = registry.simulator().simulate(cell, profile, registry.lengths(cell.workload))
            records.append(builder.simulated(cell, prediction, profile.name))
            store.append(records[-1])
        return records
