"""The launches of a cell on one side of a comparison, and which cells of two sides belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from harness.api import HarnessError, RunRecord, RunSpec
from reports.cells import name_of, settings_of, workload_of
from reports.summary import throughput
from reports.text import finite, median, one_line, positive
from reports.verdicts import CellVerdict

THROUGHPUT = "throughput"


@dataclass(frozen=True)
class Sample:
    """The launches of one cell on one side."""

    records: tuple[RunRecord, ...]
    speeds: tuple[float, ...]

    @property
    def spec(self) -> RunSpec:
        """What was asked for, as the last launch was labelled."""
        return self.records[-1].spec

    @property
    def telling(self) -> tuple[RunRecord, ...]:
        """Launches that say something about the engine."""
        return tuple(r for r in self.records if r.status != "interrupted")

    @property
    def ok(self) -> tuple[RunRecord, ...]:
        """Those whose figures count."""
        return tuple(r for r in self.records if r.status == "ok")

    @property
    def failed(self) -> tuple[RunRecord, ...]:
        """Those that did not end ok."""
        return tuple(r for r in self.telling if r.status != "ok")

    @property
    def expected(self) -> bool:
        """Whether it failed just as its suite says."""
        return bool(self.telling) and all(r.status == r.spec.expect != "ok" for r in self.telling)

    @property
    def virtual(self) -> bool:
        """Whether its figures are a model's, and not measured."""
        return any(r.simulated or r.projected for r in self.records)


def samples_of(records: Iterable[RunRecord], metric: str) -> dict[str, Sample]:
    """Launches by cell, with the figures of those that ended ok."""
    cells: dict[str, list[RunRecord]] = {}
    for record in records:
        cells.setdefault(record.fingerprint, []).append(record)
    return {
        key: Sample(tuple(some), tuple(v for r in some if r.status == "ok" and (v := speed_of(r, metric)) is not None))
        for key, some in cells.items()
    }


def speed_of(record: RunRecord, metric: str) -> float | None:
    """A launch's figure such that more is better: times as their reciprocals. None: not measured, or not positive."""
    value = positive(value_of(record, metric))
    return value if value is None or _more_is_better(metric) else 1 / value


def value_of(record: RunRecord, metric: str) -> float | None:
    """A launch's figure as it was recorded."""
    return throughput(record) if metric == THROUGHPUT else finite(record.metrics.get(metric))


def _more_is_better(metric: str) -> bool:
    return metric == THROUGHPUT or metric.endswith("_tok_s")


def unit_of(metric: str, records: Iterable[RunRecord]) -> str:
    """What a metric is in, by its name. Raises HarnessError for one that no record has, or that has no better."""
    known = sorted({name for r in records for name in r.metrics if name.endswith("_s")})
    if metric != THROUGHPUT and metric not in known:
        raise HarnessError(f"no speed or time named {metric!r} here; there are {', '.join([THROUGHPUT, *known])}")
    return "tok/s" if _more_is_better(metric) else "s"


def pairs_of(before: Mapping[str, Sample], after: Mapping[str, Sample]) -> list[tuple[Sample | None, Sample | None]]:
    """Cells that are the same on both sides; what is left is paired by name, to say how it changed."""
    pairs: list[tuple[Sample | None, Sample | None]] = [(before[k], after[k]) for k in before if k in after]
    old = [s for k, s in before.items() if k not in after]
    new = [s for k, s in after.items() if k not in before]
    for sample in old:
        name = sample.records[-1].spec.name
        same = next((s for s in new if s.records[-1].spec.name == name), None)
        new = [s for s in new if s is not same]
        pairs.append((sample, same))
    return [*pairs, *((None, sample) for sample in new)]


def in_unit(shown: CellVerdict, a: Sample | None, b: Sample | None, metric: str) -> CellVerdict:
    """With both sides' medians as they were recorded."""
    base, head = (
        median([value_of(r, metric) for r in side.records if r.status == "ok"]) if side else None for side in (a, b)
    )
    return replace(shown, base=base, head=head)


def labelled(sample: Sample | None) -> CellVerdict:
    """A cell's names, with nothing said of it yet."""
    record = sample.records[-1] if sample else None
    assert record is not None  # a pair has at least one side, and a side at least one record
    return CellVerdict(name_of(record), one_line(record.spec.engine), workload_of(record), "not comparable", "")


def changed_cell(a: RunRecord, b: RunRecord) -> str:
    """Which settings of two cells of one name differ; empty where the cells are the same."""
    if a.fingerprint == b.fingerprint:
        return ""
    old, new = settings_of(a.spec), settings_of(b.spec)
    apart = [k for k in {**old, **new} if old.get(k) != new.get(k) and k not in RunSpec.LABELS]
    changed = "; ".join(f"{k} {old.get(k)} is {new.get(k)}" for k in apart)
    return one_line(changed) or "measured by another version, which tells cells apart in another way"
