"""`harness run --simulate`: a suite's cells on a machine that is not here, as records beside those of runs."""

import shlex
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from harness import hardware, registry
from harness.api import RunRecord
from harness.run.options import Selection
from harness.run.records import RecordBuilder
from harness.run.store import Store, write_suite_copy


def simulate(
    selection: Selection, out: Path, name: str, cache: Path, report: Callable[[int, int], None]
) -> list[RunRecord]:
    """Predicts every selected cell once for the hardware `name` and writes the records; earlier ones are set aside.

    `report` is told how many cells are done, and of how many.

    Raises HarnessError for unknown hardware, and for a folder that cannot be written.
    """
    profile, cells = hardware.load(name, cache), selection.cells
    command = f"{selection.command} --simulate --hardware {shlex.quote(name)}"
    store, builder = Store(out), RecordBuilder(command, {})
    with closing(store):
        store.open(fresh=True)
        write_suite_copy(selection.path, out)
        builder.collect_provenance()
        records = []
        for i, cell in enumerate(cells):
            report(i, len(cells))
            prediction = registry.simulator().simulate(cell, profile, registry.lengths(cell.workload))
            records.append(builder.simulated(cell, prediction, profile.name))
            store.append(records[-1])
        return records
