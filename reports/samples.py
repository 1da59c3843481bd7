"""The launches of a cell on one side of a comparison, and the pairing of cells of two sides."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.api import HarnessError, RunRecord, RunSpec
from reports.records import settings_of
from reports.summary import kind_of, throughput
from reports.text import finite, grouped, one_line, positive

THROUGHPUT = "throughput"


@dataclass(frozen=True)
class Sample:
    """The launches of a cell on one side; `speeds` are the figures of the ok launches, higher is better."""

    records: tuple[RunRecord, ...]
    speeds: tuple[float, ...]

    @property
    def spec(self) -> RunSpec:
        """The spec of the last launch."""
        return self.records[-1].spec

    @property
    def ended(self) -> tuple[RunRecord, ...]:
        """Launches that were not interrupted."""
        return tuple(r for r in self.records if r.status != "interrupted")

    @property
    def ok(self) -> tuple[RunRecord, ...]:
        """Launches that ended ok, whose figures count."""
        return tuple(r for r in self.records if r.status == "ok")

    @property
    def failed(self) -> tuple[RunRecord, ...]:
        """Launches that ended with any other status."""
        return tuple(r for r in self.ended if r.status != "ok")

    @property
    def expected_failure(self) -> bool:
        """Whether every launch failed with the status that the suite expects."""
        return bool(self.ended) and all(r.status == r.spec.expect != "ok" for r in self.ended)

    @property
    def virtual(self) -> bool:
        """Whether its figures are simulated or projected."""
        return kind_of(self.records) != "measured"


def samples_of(records: Iterable[RunRecord], metric: str) -> dict[str, Sample]:
    """Samples by fingerprint."""
    return {
        key: Sample(
            tuple(launches),
            tuple(v for r in launches if r.status == "ok" and (v := speed_of(r, metric)) is not None),
        )
        for key, launches in grouped(records, lambda r: r.fingerprint).items()
    }


def speed_of(record: RunRecord, metric: str) -> float | None:
    """A launch's figure as a speed, higher is better: a time becomes its reciprocal. None: missing or not positive."""
    value = positive(value_of(record, metric))
    return value if value is None or _higher_is_better(metric) else 1 / value


def value_of(record: RunRecord, metric: str) -> float | None:
    """A launch's figure as recorded."""
    return throughput(record) if metric == THROUGHPUT else finite(record.metrics.get(metric))


def _higher_is_better(metric: str) -> bool:
    return metric == THROUGHPUT or metric.endswith("_tok_s")


def unit_of(metric: str, records: Iterable[RunRecord]) -> str:
    """The unit of a speed or time, by its name. Raises HarnessError for any other metric, or one without records."""
    known = sorted({name for r in records for name in r.metrics if name.endswith("_s")})
    if metric != THROUGHPUT and metric not in known:
        raise HarnessError(f"no speed or time is named {metric!r}; the records have {', '.join([THROUGHPUT, *known])}")
    return "tok/s" if _higher_is_better(metric) else "s"


def pairs_of(before: Mapping[str, Sample], after: Mapping[str, Sample]) -> list[tuple[Sample | None, Sample | None]]:
    """Pairs equal cells of both sides, then the others by name, so that a changed cell can be reported."""
    pairs: list[tuple[Sample | None, Sample | None]] = [(before[k], after[k]) for k in before if k in after]
    new = [s for k, s in after.items() if k not in before]
    for sample in (s for k, s in before.items() if k not in after):
        same = next((s for s in new if s.spec.name == sample.spec.name), None)
        new = [s for s in new if s is not same]
        pairs.append((sample, same))
    return [*pairs, *((None, sample) for sample in new)]


def changed_cell(a: RunRecord, b: RunRecord) -> str:
    """The settings that differ between two cells of the same name; empty where the cells are the same."""
    if a.fingerprint == b.fingerprint:
        return ""
    old, new = settings_of(a.spec), settings_of(b.spec)
    keys = [k for k in {**old, **new} if old.get(k) != new.get(k) and k not in RunSpec.LABELS]
    changed = "; ".join(f"{k} was {old.get(k)}, is {new.get(k)}" for k in keys)
    return one_line(changed) or "another version of the harness, with other fingerprints, measured it"
