"""Summarises records as one row a cell: medians, ratio to the best rival, fraction of the bound."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from harness.api import Bound, Phase, RunRecord, RunSpec, Status
from reports.rates import with_rates_around
from reports.records import name_of, workload_of
from reports.stats import Ratio, ratio_of
from reports.text import finite, grouped, largest, median, one_line, positive, quotient

Kind = Literal["measured", "simulated"]


@dataclass(frozen=True)
class CellSummary:
    """One cell over its repeats. Rates in tokens/s, times in seconds; None means not measured.

    Figures cover the repeats that count (see `counted`) and are medians; the memory figures are maxima. `ratio` is the
    quotient of medians to the cell's rival: the fastest ranked cell of another engine in the same workload, or of the
    same engine where only one engine is ranked. `label` is the name in charts, with a number where several cells of the
    workload have the same name, and with the qualifiers.
    """

    fingerprint: str
    name: str
    engine: str
    workload: str
    statuses: tuple[Status, ...]
    reference: bool
    kind: Kind
    label: str = ""
    batch: int | None = None
    compute_dtype: str | None = None
    throughput: tuple[float, ...] = ()
    median: float | None = None
    ratio: Ratio | None = None
    bound_tok_s: float | None = None
    bound_fraction: float | None = None
    job_bound_tok_s: float | None = None
    job_fraction: float | None = None
    limited_by: str | None = None
    predicted_tok_s: float | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    num_requests: int | None = None
    most_requests: int | None = None
    equal_outputs: int | None = None
    compared_outputs: int | None = None
    records: tuple[RunRecord, ...] = field(default=(), repr=False, compare=False)

    @property
    def spec(self) -> RunSpec:
        """The spec of the last repeat."""
        return self.records[-1].spec

    @property
    def status(self) -> Status:
        """The first status that is not ok; interrupted repeats do not count unless all are interrupted."""
        return next((r.status for r in ended(self.records) or self.records if r.status != "ok"), "ok")

    @property
    def ok(self) -> bool:
        """Whether every repeat that was not interrupted is ok and has a throughput."""
        return self.status == "ok" and self.median is not None

    @property
    def qualifiers(self) -> tuple[str, ...]:
        """`reference` and `simulated`, where they apply."""
        return ("reference",) * self.reference + (self.kind,) * (self.kind != "measured")

    @property
    def prediction_error(self) -> float | None:
        """Relative error of the predicted throughput; positive where the prediction is too fast."""
        return None if not self.median or self.predicted_tok_s is None else self.predicted_tok_s / self.median - 1

    @property
    def expected_failure(self) -> bool:
        """See `failed_as_expected`."""
        return failed_as_expected(self.records)

    @property
    def as_expected(self) -> bool:
        """Whether every repeat that was not interrupted ended with the status that the suite expects."""
        return all(r.status == r.spec.expect for r in ended(self.records) or self.records)

    @cached_property
    def ok_records(self) -> tuple[RunRecord, ...]:
        """The repeats whose figures count; see `counted`."""
        return counted(self.records)

    @property
    def fewer_requests(self) -> bool:
        """Whether another cell of the workload completed more requests."""
        return self.num_requests is not None and self.num_requests < (self.most_requests or 0)


def ended(records: Iterable[RunRecord]) -> tuple[RunRecord, ...]:
    """Launches that were not interrupted."""
    return tuple(r for r in records if r.status != "interrupted")


def failed_as_expected(records: Iterable[RunRecord]) -> bool:
    """Whether there are launches that were not interrupted, and all failed with the status that the suite expects."""
    statuses = {(r.status, r.spec.expect) for r in ended(records)}
    return bool(statuses) and all(status == expect != "ok" for status, expect in statuses)


def counted(records: Iterable[RunRecord]) -> tuple[RunRecord, ...]:
    """The launches that ended ok and that others did not disturb; all that ended ok where none is undisturbed."""
    ok = tuple(r for r in records if r.status == "ok")
    return tuple(r for r in ok if not r.disturbed) or ok


def disturbance(records: Sequence[RunRecord]) -> str:
    """How much CPU time others took during these launches, such as "others took 12 % to 38 % of the CPU"."""
    shares = sorted(r.others_cpu for r in records)
    most = f" to {shares[-1]:.0%}" if f"{shares[0]:.0%}" != f"{shares[-1]:.0%}" else ""
    return f"others took {shares[0]:.0%}{most} of the CPU"


def summary_rows(records: Iterable[RunRecord]) -> list[CellSummary]:
    """One row a cell, grouped by workload: ranked cells, fastest first, then the others, then references."""
    cells = grouped(with_rates_around(records), lambda r: r.fingerprint)
    groups = by_workload([_cell(sorted(repeats, key=lambda r: r.repeat)) for repeats in cells.values()])
    return [row for group in groups.values() for row in _labelled(_relate(group))]


def kind_of(records: Sequence[RunRecord]) -> Kind:
    """Whether a cell's figures are measured; a single simulated record decides."""
    return "simulated" if any(r.simulated for r in records) else "measured"


def by_workload(rows: Iterable[CellSummary]) -> dict[str, list[CellSummary]]:
    """Rows by workload (model and requests); rows of a workload are comparable."""
    return grouped(rows, lambda row: row.workload)


def ranked(rows: Iterable[CellSummary]) -> list[CellSummary]:
    """The competing cells, fastest first: ok, not a reference, and measured unless none is."""
    ok = [r for r in rows if r.ok and not r.reference]
    measured = [r for r in ok if r.kind == "measured"]
    return sorted(measured or ok, key=lambda r: -(r.median or 0))


def measured_sum(record: RunRecord, name: str, phase: Phase) -> float | None:
    """The sum of a counter's samples in a phase; None where the record lacks the counter."""
    return finite(record.total(name, phase))


def measured_peak(record: RunRecord, name: str) -> float | None:
    """The largest sample of a measurement over all phases."""
    return largest(finite(v) for m in record.measurements if m.name == name for v in m.samples)


def throughput(record: RunRecord) -> float | None:
    """A repeat's generation throughput, or else its scoring throughput, tokens/s; None where it is not positive."""
    rate = record.metrics.get("generation_throughput_tok_s")
    return positive(record.metrics.get("score_throughput_tok_s") if rate is None else rate)


def metric(records: Sequence[RunRecord], name: str) -> float | None:
    """The median of a metric over records."""
    return median([finite(r.metrics.get(name)) for r in records])


def per_token(records: Sequence[RunRecord], counter: str) -> float | None:
    """The median over records of a counter during generation / the generated tokens."""
    totals = [(measured_sum(r, counter, "generate"), finite(r.metrics.get("generated_tokens"))) for r in records]
    return median([quotient(total, tokens) for total, tokens in totals])


def _cell(records: Sequence[RunRecord]) -> CellSummary:
    last = records[-1]
    ok = counted(records)
    loads = [r.load for r in records if r.load]
    spec = last.spec
    speeds = tuple(v for r in ok if (v := throughput(r)) is not None)
    memories = [r.memory for r in records if r.memory]
    bounds = [r.bound for r in ok if r.bound and finite(r.bound.throughput_tok_s)]
    requests, requested = metric(ok, "num_requests"), spec.policy.compute_dtype
    return CellSummary(
        fingerprint=last.fingerprint,
        name=name_of(last),
        engine=one_line(spec.engine),
        workload=workload_of(last),
        statuses=tuple(r.status for r in records),
        reference=spec.reference,
        kind=kind_of(records),
        batch=loads[-1].block_size if loads else spec.policy.block_size if spec.tune == "none" else None,
        compute_dtype=loads[-1].compute_dtype if loads else None if requested == "auto" else requested,
        throughput=speeds,
        median=median(speeds),
        bound_tok_s=median([b.throughput_tok_s for b in bounds]),
        bound_fraction=_fraction([(r, r.bound) for r in ok]),
        job_bound_tok_s=median([finite(r.job_bound.throughput_tok_s) for r in ok if r.job_bound]),
        job_fraction=_fraction([(r, r.job_bound) for r in ok]),
        limited_by=Counter(b.limited_by for b in bounds).most_common(1)[0][0] if bounds else None,
        predicted_tok_s=median([finite(r.predicted.throughput_tok_s) for r in ok if r.predicted]),
        peak_bytes=largest(m.peak_bytes for m in memories),
        limit_bytes=largest(m.limit_bytes for m in memories),
        num_requests=None if requests is None or spec.workload.online else int(requests),
        records=tuple(records),
    )


def _fraction(bounded: Iterable[tuple[RunRecord, Bound | None]]) -> float | None:
    """The median share of their bounds that records reached."""
    return median([quotient(throughput(r), finite(bound.throughput_tok_s)) for r, bound in bounded if bound])


def _relate(group: Sequence[CellSummary]) -> list[CellSummary]:
    """Sorts the cells of a workload and adds each cell's ratio to its rival and its agreement with the reference."""
    order = ranked(group)
    rank = {r.fingerprint: i for i, r in enumerate(order)}
    most = largest(r.num_requests for r in group)
    references = [r for r in group if r.reference and r.ok_records]
    # only these can be a rival: the fastest cell of each engine, and the second fastest of all
    candidates = [*{r.engine: r for r in reversed(order)}.values(), *order[:2]]
    candidates.sort(key=lambda r: rank[r.fingerprint])
    rows = []
    for row in group:
        rival = rival_of(row, candidates) if row.fingerprint in rank else None
        ratio = ratio_of(rival.throughput, row.throughput) if rival else None
        rows.append(_compare_outputs(replace(row, most_requests=most, ratio=ratio), references))
    return sorted(rows, key=lambda r: (r.reference, rank.get(r.fingerprint, len(order)), not r.ok))


def rival_of(row: CellSummary, order: Sequence[CellSummary]) -> CellSummary | None:
    """The rival of `row` among cells ordered by speed: the first of another engine, or else of the same engine."""
    other = next((r for r in order if r.engine != row.engine), None)
    return other or next((r for r in order if r.fingerprint != row.fingerprint), None)


def _compare_outputs(row: CellSummary, references: Sequence[CellSummary]) -> CellSummary:
    """Counts outputs equal to those of a reference with the same seed and, if possible, the same compute dtype."""
    if row.reference:
        return row
    same = [r for r in references if r.spec.seed == row.spec.seed]
    reference = min(same, key=lambda r: r.compute_dtype != row.compute_dtype, default=None)
    if reference is None:
        return row
    expected = {t.id: t.digest for t in reference.ok_records[0].requests if t.digest}
    pairs = [(t.digest, expected[t.id]) for r in row.ok_records for t in r.requests if t.digest and t.id in expected]
    if not pairs:
        return row
    return replace(row, equal_outputs=sum(digest == other for digest, other in pairs), compared_outputs=len(pairs))


def _labelled(rows: Iterable[CellSummary]) -> Iterator[CellSummary]:
    uses: Counter[str] = Counter()
    for row in rows:
        uses[row.name] += 1
        numbered = row.name if uses[row.name] == 1 else f"{row.name} ({uses[row.name]})"
        yield replace(row, label=f"{numbered} ({', '.join(row.qualifiers)})" if row.qualifiers else numbered)
