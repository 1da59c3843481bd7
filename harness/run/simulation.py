"""`harness run --simulate`: a suite's cells on a machine that is not here, as records beside those of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from harness import hardware, registry
from harness.api import RunRecord, RunSpec
from harness.hardware import provenance
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

    Raises HarnessError for hardware that there is not, and for a folder that cannot be written.
    """
    profile = hardware.load(name, cache)
    store = Store(out)
    store.open(fresh=True)
    try:
        write_suite_copy(suite_file, out)
        known = {"hardware": profile.name, "harness": provenance.collect()["harness"]}
        records = []
        for i, cell in enumerate(cells):
            report(i, len(cells))
            record = replace(
                registry.simulate(cell, profile, registry.lengths(cell.workload)),
                spec=cell,
                fingerprint=cell.fingerprint(),
                started_at=provenance.now(),
                provenance=known,
                command=f"{command} --cell {cell.name}",
            )
            store.append(record)
            records.append(record)
        return records
    finally:
        store.close()
