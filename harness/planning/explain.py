"""`harness plan --explain`: where a run's time differs from its prediction, and by how much."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness import hardware, registry
from harness.api import Forecast, HarnessError, RunRecord

#: The parts of a job's time: names of metrics, and words for them. The rest is what they leave of the total.
_PARTS = {
    "task_products_s": "products",
    "task_attention_s": "attention",
    "task_waiting_s": "waiting for the disk",
    "task_other_s": "between products",
}
_REST = "the rest"
#: The smallest difference that is named, as a share of the measured time.
_NAMED = 0.02


@dataclass(frozen=True)
class Explanation:
    """One launch: predicted and measured tokens/s, and for each part of its work predicted and measured seconds."""

    cell: str
    repeat: int
    hardware: str
    predicted_tok_s: float
    measured_tok_s: float
    seconds: Mapping[str, tuple[float, float]]

    @property
    def error(self) -> float:
        """Relative error of the predicted throughput, positive where it was too high."""
        return self.predicted_tok_s / self.measured_tok_s - 1

    def differences(self) -> str:
        """The parts that took much longer or shorter than predicted, largest difference first."""
        total = sum(measured for _, measured in self.seconds.values())
        excess = {part: measured - predicted for part, (predicted, measured) in self.seconds.items()}
        named = sorted((p for p in excess if abs(excess[p]) >= _NAMED * total), key=lambda p: -abs(excess[p]))
        return ", ".join(f"{part} {excess[part]:+.2g} s" for part in named) or "nothing by more than 2 %"


def explain(path: Path, profile: str, cache: Path) -> list[Explanation]:
    """Explains every finished launch that has a prediction: the one in its record, else one by a hardware profile.

    `path`: a run folder or its records. Raises HarnessError where nothing can be explained.
    """
    from reports.records import load_records

    explanations, problem = [], "it has no finished launch of an engine with a performance model on a host (offload)"
    for record in load_records([path if path.is_dir() else path.parent]):
        if record.status != "ok" or record.simulated or not registry.engine_entry(record.spec.engine).predicted:
            continue
        if not _has_figures(record):
            problem = "a record has no throughput or no seconds"
            continue
        try:
            forecast = record.predicted or registry.forecaster().forecast(record, hardware.load(profile, cache))
        except HarnessError as exc:
            problem = str(exc)
            continue
        if forecast is not None and _is_positive(forecast.metrics.get("total_s")):
            explanations.append(_explanation(record, forecast))
    if not explanations:
        raise HarnessError(f"{path}: no launch can be explained: {problem}")
    return explanations


def _has_figures(record: RunRecord) -> bool:
    """Whether a record has the figures to explain; it comes from a file, where they may be missing or absurd."""
    return all(_is_positive(record.metrics.get(name)) for name in ("generation_throughput_tok_s", "total_s"))


def _is_positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _explanation(record: RunRecord, forecast: Forecast) -> Explanation:
    measured, predicted = record.metrics, forecast.metrics
    seconds = {word: (predicted.get(name) or 0.0, measured.get(name) or 0.0) for name, word in _PARTS.items()}
    named = [sum(pair[i] for pair in seconds.values()) for i in (0, 1)]
    total = (predicted["total_s"], measured["total_s"] or 0.0)
    seconds[_REST] = (total[0] - named[0], total[1] - named[1])
    throughput = measured["generation_throughput_tok_s"]
    assert throughput
    return Explanation(
        record.spec.name, record.repeat, forecast.hardware, forecast.throughput_tok_s, throughput, seconds
    )
