"""Writes engines/planning/errors.yaml: how far throughputs lay from predictions, in committed runs and papers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from engines.planning import fit
from engines.planning.prediction_errors import FILE
from harness import hardware
from reports.records import load_records

RESULTS = Path(__file__).parents[1] / "results"
#: Runs since calibration measures the engine's own passes, which is the model as it is now.
RUNS = ("cpu_offload-2026-11-25", "predicted-2026-11-25", "predicted-2026-11-25-2", "predicted-2026-11-25-3",
        "quickstart-2026-11-25", "quickstart-2026-11-25-2")  # fmt: skip
#: Eight of ten lie between the first and the last.
PERCENTILES = (10, 50, 90)
HEADER = """\
# Measured over predicted throughput: its 10th, 50th and 90th percentile. `python docs/model/errors.py` writes this file
# from committed runs (launches of our engine on a host) and from papers (each table predicted by constants that were
# fitted on the other tables only).
"""


def main() -> None:
    """Reads the runs, fits the published tables and writes the file."""
    FILE.write_text(HEADER + yaml.safe_dump({"measured": measured(), "published": published()}, sort_keys=False))


def measured() -> dict[str, Any]:
    """By schedule, of launches whose record has a prediction."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for record in load_records([RESULTS / run for run in RUNS]):
        rate = record.metrics.get("generation_throughput_tok_s")
        if record.status == "ok" and record.predicted is not None and rate:
            ratios[record.spec.policy.schedule].append(rate / record.predicted.throughput_tok_s)
    return {"runs": list(RUNS), "schedules": {name: _summary(each) for name, each in sorted(ratios.items())}}


def published() -> dict[str, Any]:
    """By hardware and engine, of published cells."""
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    profiles = {name: hardware.load(name) for name in hardware.names()}
    for name, _, _, fitted, cells in fit.held_out_tables(profiles):
        for outcome in fitted.outcomes(cells):
            assert outcome.cell.figure is not None
            ratios[name][outcome.cell.engine].append(float(outcome.cell.figure) / outcome.predicted)
    return {name: _summaries(engines) for name, engines in ratios.items()}


def _summaries(engines: Mapping[str, Iterable[float]]) -> dict[str, Any]:
    return {engine: _summary(list(each)) for engine, each in engines.items()}


def _summary(ratios: Sequence[float]) -> dict[str, Any]:
    return {"count": len(ratios), "ratio": [round(float(r), 3) for r in np.percentile(ratios, PERCENTILES)]}


if __name__ == "__main__":
    main()
