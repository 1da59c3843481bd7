"""`harness run --simulate`: a suite's cells on a machine that is not here, as records beside those of runs."""

import functools
import shlex
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from harness import hardware, registry
from harness.api import HarnessError, RunRecord
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
    if online := [cell.name for cell in cells if cell.workload.online]:
        raise HarnessError(f"cell {online[0]}: its requests arrive while it runs, which is not predicted; run it")
    store, builder = Store(out), RecordBuilder(command, {})
    with closing(store):
        store.open(fresh=True)
        write_suite_copy(selection.path, out)
        builder.collect_provenance()
        records = []
        describe = functools.cache(partial(registry.describe_model, cache=cache))
        for i, cell in enumerate(cells):
            report(i, len(cells))
            lengths = registry.lengths(cell.workload)
            prediction = registry.simulator().simulate(cell, profile, lengths, describe)
            records.append(builder.simulated(cell, prediction, profile.name))
            store.append(records[-1])
        return records
