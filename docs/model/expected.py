"""Writes suites/expected.json: how long shipped suites took in committed runs, for `harness ls suites`."""

import json
from pathlib import Path

from harness.suite.shipped import EXPECTED, shipped_suites
from reports.records import load_records

RESULTS = Path(__file__).parents[1] / "results"
#: A run counts if it has so large a share of the suite's cells, with their workloads as they are now.
SHARE = 0.8


def main() -> None:
    """Reads all committed runs; of a suite the newest counts."""
    runs = [(folder.name, load_records([folder])) for folder in sorted(RESULTS.iterdir())
            if (folder / "records.jsonl").exists()]  # fmt: skip
    minutes = {}
    for suite in shipped_suites():
        workloads = {cell.name: cell.workload for cell in suite.cells}
        launches = sum(cell.repeats for cell in suite.cells)
        for run, records in runs:
            mine = [r for r in records if r.spec.suite == suite.name and r.spec.workload == workloads.get(r.spec.name)]
            if len({r.spec.name for r in mine}) >= SHARE * len(workloads):
                each = sum(r.wall_s for r in mine) / len(mine)
                minutes[suite.name] = {"minutes": round(each * launches / 60, 1), "run": run}
    EXPECTED.write_text(json.dumps(minutes, indent=1) + "\n")


if __name__ == "__main__":
    main()
