"""The launches of a cell on one side of a comparison, and the pairing of cells of two sides."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from harness.api import HarnessError, RunRecord, RunSpec
from reports.records import settings_of
from reports.summary import ended, failed_as_expected, kind_of, throughput
from reports.text import finite, grouped, median, one_line, positive

THROUGHPUT = "throughput"


@dataclass(frozen=True)
class Sample:
    """The launches of a cell on one side, of which a metric is compared."""

    records: tuple[RunRecord, ...]
    metric: str = THROUGHPUT

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """The figures of the ok launches, higher is better."""
        return tuple(v for r in self.ok if (v := speed_of(r, self.metric)) is not None)

    @property
    def level(self) -> float | None:
        """The median of `speeds`, in the metric's unit: ratios are quotients of these. None without figures."""
        middle = median(self.speeds)
        return middle if middle is None or _higher_is_better(self.metric) else 1 / middle

    @property
    def spec(self) -> RunSpec:
        """The spec of the last launch."""
        return self.records[-1].spec

    @property
    def ended(self) -> tuple[RunRecord, ...]:
        """Launches that were not interrupted."""
        return ended(self.records)

    @property
    def ok(self) -> tuple[RunRecord, ...]:
        """Launches that ended ok."""
        return tuple(r for r in self.records if r.status == "ok")

    @property
    def disturbed(self) -> tuple[RunRecord, ...]:
        """Launches that ended ok and that others disturbed."""
        return tuple(r for r in self.ok if r.disturbed)

    @property
    def undisturbed(self) -> "Sample":
        """The sample without disturbed launches; itself where there are none."""
        if not self.disturbed:
            return self
        return Sample(tuple(r for r in self.records if r.status != "ok" or not r.disturbed), self.metric)

    @property
    def failed(self) -> tuple[RunRecord, ...]:
        """Launches that ended with any other status."""
        return tuple(r for r in self.ended if r.status != "ok")

    @property
    def expected_failure(self) -> bool:
        """See `failed_as_expected`."""
        return failed_as_expected(self.records)

    @property
    def virtual(self) -> bool:
        """Whether its figures are simulated."""
        return kind_of(self.records) != "measured"


def samples_of(records: Iterable[RunRecord], metric: str) -> dict[str, Sample]:
    """Samples by fingerprint."""
    return {k: Sample(tuple(launches), metric) for k, launches in grouped(records, lambda r: r.fingerprint).items()}


def in_turns(a: Sample, b: Sample) -> bool:
    """Whether the launches of both sides alternate, so that a drift of the machine is no difference between them.

    At least half as many changes of side as by `ci/interleave.sh`, and neither side much earlier than the other: of all
    pairs of launches, a quarter to three quarters have `a` first. False where a launch does not say when it began.
    """
    sides = [sorted(r.started_at for r in side.ok) for side in (a, b)]
    if not all(sides) or "" in (sides[0][0], sides[1][0]):
        return False
    order = [side for _, side in sorted((time, i) for i, times in enumerate(sides) for time in times)]
    changes = sum(x != y for x, y in pairwise(order))
    earlier = sum((x < y) + (x == y) / 2 for x in sides[0] for y in sides[1]) / (len(sides[0]) * len(sides[1]))
    return changes >= min(map(len, sides)) / 2 and 0.25 <= earlier <= 0.75


def speed_of(record: RunRecord, metric: str) -> float | None:
    """A launch's figure as a speed, higher is better: a time becomes its reciprocal. None: missing or not positive."""
    value = positive(value_of(record, metric))
    return value if value is None or _higher_is_better(metric) else 1 / value


def value_of(record: RunRecord, metric: str) -> float | None:
    """A launch's figure as recorded."""
    return throughput(record) if metric == THROUGHPUT else finite(record.metrics.get(metric))


def _higher_is_better(metric: str) -> bool:
    return metric == THROUGHPUT or metric.endswith(("_tok_s", "_req_s"))


def unit_of(metric: str, records: Iterable[RunRecord]) -> str:
    """The unit of a speed or time, by its name. Raises HarnessError for any other metric, or one without records."""
    known = sorted({name for r in records for name in r.metrics if name.endswith("_s")})
    if metric != THROUGHPUT and metric not in known:
        raise HarnessError(f"no speed or time is named {metric!r}; the records have {', '.join([THROUGHPUT, *known])}")
    if metric.endswith("_req_s"):
        return "req/s"
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
