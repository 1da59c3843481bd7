"""`harness plan --explain`: where a run on this host and its prediction part, and by how much."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from harness import hardware, registry
from harness.api import Forecast, HarnessError, RunRecord
from harness.common.tables import print_rows

#: What the seconds of a job are made of: names of metrics, and words for them. The rest is the difference of the sums.
_PARTS = {
    "task_products_s": "products",
    "task_attention_s": "attention",
    "task_waiting_s": "waiting for the disk",
    "task_other_s": "between products",
}
_REST = "the rest"
#: Differences that are named in a line: of all seconds.
_TOLD = 0.02


@dataclass(frozen=True)
class Explanation:
    """One launch: tokens/s, and by part of its work the seconds (predicted, measured)."""

    cell: str
    repeat: int
    hardware: str
    predicted_tok_s: float
    measured_tok_s: float
    seconds: Mapping[str, tuple[float, float]]

    @property
    def error(self) -> float:
        """By how much the prediction was above what was measured."""
        return self.predicted_tok_s / self.measured_tok_s - 1

    def words(self) -> str:
        """The parts that took much longer or shorter than predicted, most telling first."""
        whole = sum(measured for _, measured in self.seconds.values())
        apart = {part: measured - predicted for part, (predicted, measured) in self.seconds.items()}
        told = sorted((p for p in apart if abs(apart[p]) >= _TOLD * whole), key=lambda p: -abs(apart[p]))
        return ", ".join(f"{part} {apart[part]:+.2g} s" for part in told) or "nothing by more than 2 %"


def explain(path: Path, profile: str, cache: Path) -> list[Explanation]:
    """Every finished launch of a run that can be predicted: by what its record says, else by a profile.

    `path`: a run folder or its records. Raises HarnessError where nothing can be explained.
    """
    from reports.records import load_records

    found, problem = [], "none of an engine that is predicted on a host finished there (engine offload is)"
    for record in load_records([path if path.is_dir() else path.parent]):
        if record.status != "ok" or record.simulated or not registry.engine_entry(record.spec.engine).predicted:
            continue
        if not _measured(record):
            problem = "a record has no throughput or no seconds"
            continue
        try:
            forecast = record.predicted or registry.forecaster().forecast(record, hardware.load(profile, cache))
        except HarnessError as exc:
            problem = str(exc)
            continue
        if forecast is not None and _is_time(forecast.metrics.get("total_s")):
            found.append(_explained(record, forecast))
    if not found:
        raise HarnessError(f"{path}: no launch can be explained: {problem}")
    return found


def _measured(record: RunRecord) -> bool:
    """Whether it has the figures that are explained: records come from files."""
    figures = record.metrics.get("generation_throughput_tok_s"), record.metrics.get("total_s")
    return all(_is_time(figure) for figure in figures)


def _is_time(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _explained(record: RunRecord, forecast: Forecast) -> Explanation:
    measured, predicted = record.metrics, forecast.metrics
    seconds = {word: (predicted.get(name) or 0.0, measured.get(name) or 0.0) for name, word in _PARTS.items()}
    known = [sum(pair[i] for pair in seconds.values()) for i in (0, 1)]
    total = (predicted["total_s"], measured["total_s"] or 0.0)
    seconds[_REST] = (total[0] - known[0], total[1] - known[1])
    throughput = measured["generation_throughput_tok_s"]
    assert throughput
    return Explanation(
        record.spec.name, record.repeat, forecast.hardware, forecast.throughput_tok_s, throughput, seconds
    )


def show(found: Sequence[Explanation], as_json: bool) -> None:
    """Prints a line for each launch and the median error, or one JSON object."""
    errors = [abs(one.error) for one in found]
    median = statistics.median(errors)
    if as_json:
        launches = [dataclasses.asdict(one) | {"error": one.error} for one in found]
        click.echo(json.dumps({"launches": launches, "median_absolute_error": median}))
        return
    print_rows(
        [
            {
                "cell": f"{one.cell} #{one.repeat}",
                "predicted": f"{one.predicted_tok_s:.3g}",
                "measured tok/s": f"{one.measured_tok_s:.3g}",
                "error": f"{one.error:+.1%}",
                "measured beyond what was predicted": one.words(),
            }
            for one in found
        ],
        False,
    )
    inside = sum(error <= 0.15 for error in errors)
    click.echo(f"\nmedian error {median:.1%}, largest {max(errors):.1%}; {inside} of {len(found)} within 15 %")
