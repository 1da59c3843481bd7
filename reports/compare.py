"""Compares runs with a base, or engines with one of them: cell by cell, with known error rates.

The unit is a launch. A regression needs a Hodges-Lehmann ratio whose bootstrap interval excludes 1, an effect above
max(3 %, twice the A/A noise floor), and an exact Mann-Whitney p below alpha after Holm's correction over the cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.api import HarnessError
from reports.accuracy import lost_accuracy
from reports.cells import workload_of
from reports.environment import differing
from reports.failures import by_failures, failure_remarks
from reports.records import Runs, read_runs
from reports.samples import THROUGHPUT, Sample, blank_verdict, changed_cell, pairs_of, samples_of, unit_of, with_medians
from reports.stats import ALPHA, hodges_lehmann, holm, launches_needed, mann_whitney, noise_floor, ratio_of, smallest_p
from reports.summary import DISTURBED, other_cpu_share
from reports.text import median, one_line, plural
from reports.verdicts import LEAST_EFFECT, MARGIN, CellVerdict, Comparison, Verdict

#: The verdicts of a comparison of engines, where a slower engine is no regression.
_BETWEEN_ENGINES: dict[Verdict, Verdict] = {"regression": "behind", "improvement": "ahead"}


@dataclass(frozen=True)
class _Rules:
    """How to judge cells: the metric, the A/A run's samples, environment items that may differ, levels, engines."""

    metric: str
    aa: Mapping[str, Sample] | None
    allow: Sequence[str]
    alpha: float
    margin: float
    engines: bool = False


def compare_runs(
    base: Path,
    heads: Sequence[Path],
    metric: str = THROUGHPUT,
    again: Path | None = None,
    allow: Sequence[str] = (),
    alpha: float = ALPHA,
    margin: float = MARGIN,
) -> list[Comparison]:
    """Compares each of `heads` with `base`; all are run directories.

    `again`: another run of the base, whose difference from it is noise (A/A). `allow`: environment items that may
    differ, such as `packages.torch`. `alpha`: the level over all cells. `margin`: the slowdown that "no change" must
    exclude. Raises HarnessError for directories without records and unknown metrics.
    """
    before, second_base = read_runs([base]), read_runs([again]) if again else None
    base_label, *labels = _labels([base, *heads])
    comparisons = []
    for label, folder in zip(labels, heads, strict=True):
        compared = compare_records(before, read_runs([folder]), metric, second_base, allow, alpha, margin)
        comparisons.append(replace(compared, base=base_label, head=label))
    return comparisons


def compare_records(
    before: Runs,
    after: Runs,
    metric: str = THROUGHPUT,
    again: Runs | None = None,
    allow: Sequence[str] = (),
    alpha: float = ALPHA,
    margin: float = MARGIN,
) -> Comparison:
    """As `compare_runs`, for runs that are already read."""
    unit = unit_of(metric, [*before.records, *after.records])
    cells = pairs_of(samples_of(before.launches, metric), samples_of(after.launches, metric))
    aa = None if again is None else samples_of(again.launches, metric)
    verdicts = _judge(cells, _Rules(metric, aa, allow, alpha, margin))
    notes = (*before.notes, *after.notes, *_order_notes(before, after))
    return Comparison("base", "head", metric, unit, alpha, tuple(verdicts), notes)


def compare_engines(
    runs: Sequence[Path], against: str, metric: str = THROUGHPUT, alpha: float = ALPHA, margin: float = MARGIN
) -> list[Comparison]:
    """Compares the cells of each workload of each run with the cell named `against`, or with that engine's fastest one.

    Excludes simulated and projected cells, and references other than one that `against` names. Holm's correction covers
    a workload. Raises HarnessError where no workload has such a cell and another one.
    """
    comparisons, engines = [], set()
    for run in map(read_runs, ([folder] for folder in runs)):
        unit = unit_of(metric, run.records)
        groups: dict[str, list[Sample]] = {}
        for sample in samples_of(run.records, metric).values():
            engines.add(one_line(sample.spec.engine))
            if not sample.virtual:
                groups.setdefault(workload_of(sample.records[-1]), []).append(sample)
        for workload, cells in groups.items():
            named = [s for s in cells if s.speeds and against == s.spec.name]
            named = named or [s for s in cells if s.speeds and against == s.spec.engine and not s.spec.reference]
            if not named:
                continue
            base = max(named, key=lambda s: median(s.speeds) or 0)
            others = [s for s in cells if s is not base and not s.spec.reference]
            if others:
                verdicts = _judge([(base, s) for s in others], _Rules(metric, None, (), alpha, margin, engines=True))
                label = one_line(base.spec.name)
                comparisons.append(Comparison(label, workload, metric, unit, alpha, tuple(verdicts), run.notes))
    if not comparisons:
        known = ", ".join(sorted(engines))
        raise HarnessError(f"no measured cell or engine named {against!r} with others to compare; engines: {known}")
    return comparisons


def _judge(pairs: Sequence[tuple[Sample | None, Sample | None]], rules: _Rules) -> list[CellVerdict]:
    """The verdict of each (base, head) pair; Holm's correction covers the pairs that need a test."""
    untested = [_without_test(a, b, rules) for a, b in pairs]
    compared = [(a, b) for (a, b), verdict in zip(pairs, untested, strict=True) if verdict is None and a and b]
    adjusted = iter(holm([mann_whitney(a.speeds, b.speeds) for a, b in compared if not a.virtual]))
    tests = sum(not a.virtual for a, _ in compared)
    verdicts = []
    for (a, b), known in zip(pairs, untested, strict=True):
        verdict = known
        if verdict is None:
            assert a is not None and b is not None  # a one-sided pair has its verdict already
            by_figures = _simulated(a, b) if a.virtual else _tested(a, b, next(adjusted), tests, rules)
            verdict = _with_remarks(by_figures, a, b, rules)
        if rules.engines:
            verdict = replace(verdict, verdict=_BETWEEN_ENGINES.get(verdict.verdict, verdict.verdict))
        verdicts.append(with_medians(verdict, a, b, rules.metric))
    return verdicts


def _without_test(a: Sample | None, b: Sample | None, rules: _Rules) -> CellVerdict | None:
    """A verdict that needs no statistics; None where the figures must be compared."""
    verdict = blank_verdict(b or a)
    if a is None:
        return replace(verdict, verdict="new", reason="not in the base")
    if b is None:
        return replace(verdict, verdict="not comparable", reason="not in the head")
    verdict = _with_counts(a, b)
    if not rules.engines and (changed := changed_cell(a.records[-1], b.records[-1])):
        return replace(verdict, verdict="not comparable", reason=f"another cell of the same name: {changed}")
    if a.virtual != b.virtual:
        reason = "one side is simulated or projected, the other measured"
        return replace(verdict, verdict="not comparable", reason=reason)
    if items := differing(a.records, b.records, rules.allow, rules.engines):
        return replace(verdict, verdict="not comparable", reason=f"another environment: {'; '.join(items)}")
    return by_failures(verdict, a, b, rules.alpha, rules.engines)


def _simulated(a: Sample, b: Sample) -> CellVerdict:
    """The verdict on simulated figures, which have no noise."""
    ratio = hodges_lehmann(a.speeds, b.speeds)
    verdict = replace(_with_counts(a, b), ratio=ratio, threshold=LEAST_EFFECT)
    if max(ratio, 1 / ratio) - 1 <= LEAST_EFFECT:
        return replace(verdict, verdict="no change", reason=f"simulated: exact, and within {LEAST_EFFECT:.0%}")
    return replace(verdict, verdict="regression" if ratio < 1 else "improvement", reason=f"simulated: {_times(ratio)}")


def _tested(a: Sample, b: Sample, p: float, tests: int, rules: _Rules) -> CellVerdict:
    """The verdict on measured figures of both sides; `p` is adjusted for `tests` tests."""
    ratio, alpha, margin = ratio_of(a.speeds, b.speeds), rules.alpha, rules.margin
    floor = _noise_floor(a, b, rules.aa)
    threshold = max(LEAST_EFFECT, 2 * (floor or 0.0))
    verdict = replace(_with_counts(a, b), ratio=ratio.ratio, low=ratio.low, high=ratio.high, p=p, noise_floor=floor,
                      threshold=threshold)  # fmt: skip
    significant = p < alpha and ratio.excludes_one
    if significant and max(ratio.ratio, 1 / ratio.ratio) - 1 > threshold:
        return replace(verdict, verdict="regression" if ratio.ratio < 1 else "improvement", reason=_times(ratio.ratio))
    if p >= alpha and smallest_p(len(a.speeds), len(b.speeds)) * tests >= alpha:
        needed = launches_needed(tests, alpha)
        why = f"{len(a.speeds)} and {len(b.speeds)} launches cannot give p < {alpha:g} over {plural(tests, 'cell')}"
        return replace(verdict, verdict="inconclusive", reason=f"{why}: run {needed} on each side")
    if ratio.low is None or ratio.low < 1 - margin:
        why = f"a slowdown of {margin:.0%} is not excluded (up to {1 - (ratio.low or 0.0):.1%} is possible)"
        return replace(verdict, verdict="inconclusive", reason=f"{why}: run more launches, or reduce the noise")
    effect = (
        f"{_times(ratio.ratio)}, below the threshold of {threshold:.1%}" if significant else "no significant difference"
    )
    return replace(verdict, verdict="no change", reason=f"{effect}; a slowdown of {margin:.0%} is excluded")


def _noise_floor(a: Sample, b: Sample, aa: Mapping[str, Sample] | None) -> float | None:
    """A/A noise: between halves of each side and, where the base ran twice, between both runs."""
    halves = noise_floor(a.speeds, b.speeds)
    again = _again(a, aa)
    if again is None:
        return halves
    ratio = hodges_lehmann(a.speeds, again.speeds)
    return max(halves or 0.0, max(ratio, 1 / ratio) - 1)


def _again(a: Sample, aa: Mapping[str, Sample] | None) -> Sample | None:
    """The cell's sample in the second run of the base; None without figures or in another environment."""
    again = (aa or {}).get(a.records[-1].fingerprint)
    return again if again and again.speeds and not differing(a.records, again.records) else None


def _with_counts(a: Sample, b: Sample) -> CellVerdict:
    return replace(blank_verdict(b), base_launches=len(a.speeds), head_launches=len(b.speeds))


def _times(ratio: float) -> str:
    return f"{abs(ratio - 1):.1%} {'slower' if ratio < 1 else 'faster'}"


def _with_remarks(verdict: CellVerdict, a: Sample, b: Sample, rules: _Rules) -> CellVerdict:
    """Adds a loss of accuracy, failures, different answers and limits, and disturbances to a verdict."""
    remarks = failure_remarks(a, b)
    lost = "" if rules.engines else lost_accuracy(a.records, b.records)
    if lost:
        verdict = replace(verdict, verdict="regression", reason=f"{lost}; speed: {verdict.reason}")
    base_answers: dict[str, set[str]] = {}  # all answers of the base, which may vary between launches in near ties
    for t in (t for r in a.ok for t in r.requests if t.digest):
        base_answers.setdefault(t.id, set()).add(t.digest)
    same = [t.digest in base_answers[t.id] for r in b.ok for t in r.requests if t.id in base_answers]
    if changed := same.count(False):
        remarks.append(f"{changed} of {len(same)} answers differ from the base's")
    if rules.engines and a.spec.limits != b.spec.limits:
        remarks.append("other limits than the base's")
    if rules.aa is not None and _again(a, rules.aa) is None:
        remarks.append("the second run of the base has no comparable figures for this cell")
    for side, sample in (("base", a), ("head", b)):
        if (share := other_cpu_share(sample.ok)) > DISTURBED:
            remarks.append(f"other processes took up to {share:.0%} of the CPU during the {side}'s launches")
    return replace(verdict, remarks=tuple(remarks))


def _order_notes(before: Runs, after: Runs) -> list[str]:
    """A note where one side ran after the other, so that machine drift looks like a difference."""
    times = [sorted(r.started_at for r in side.records if r.started_at) for side in (before, after)]
    if not all(times) or (times[0][-1] >= times[1][0] and times[1][-1] >= times[0][0]):
        return []
    return ["The sides ran one after the other, not interleaved: drift of the machine counts as a difference."]


def _labels(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with more of the path where names are equal."""
    for depth in range(1, 8):
        names = ["/".join(f.absolute().parts[-depth:]) for f in folders]
        if len(set(names)) == len(names):
            return [one_line(n) for n in names]
    return [one_line(str(f)) for f in folders]
