"""Compares runs with a base, or engines with one of them: cell by cell, with known error rates.

The unit is a launch. A regression needs a Hodges-Lehmann ratio whose bootstrap interval excludes 1, an effect above
max(3 %, twice the A/A noise floor), and an exact Mann-Whitney p below alpha after Holm's correction over the cells.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.api import HarnessError
from reports.accuracy import lost_accuracy
from reports.environment import differing
from reports.records import Runs, name_of, read_runs, workload_of
from reports.samples import THROUGHPUT, Sample, changed_cell, pairs_of, samples_of, unit_of, value_of
from reports.stats import ALPHA, hodges_lehmann, holm, launches_needed, mann_whitney, noise_floor, ratio_of, smallest_p
from reports.summary import DISTURBED, other_cpu_share
from reports.text import grouped, median, one_line, plural
from reports.verdicts import LEAST_EFFECT, MARGIN, CellVerdict, Comparison, Verdict

#: The verdicts of a comparison of engines, where a slower engine is no regression.
_BETWEEN_ENGINES: dict[Verdict, Verdict] = {"regression": "behind", "improvement": "ahead"}


@dataclass(frozen=True)
class Rules:
    """How to judge cells. `allow`: environment items that may differ, such as `packages.torch`. `alpha`: the level over
    all cells. `margin`: the slowdown that "no change" must exclude. `aa`: samples of another run of the base, whose
    difference from it is noise (A/A). `engines`: whether engines are compared, not runs.
    """

    metric: str = THROUGHPUT
    allow: Sequence[str] = ()
    alpha: float = ALPHA
    margin: float = MARGIN
    aa: Mapping[str, Sample] | None = None
    engines: bool = False


def compare_runs(base: Path, heads: Sequence[Path], rules: Rules, again: Path | None = None) -> list[Comparison]:
    """Compares each of `heads` with `base`, and takes noise also from `again`, another run of the base; all are run
    directories. Raises HarnessError for directories without records and unknown metrics.
    """
    before, second_base = read_runs([base]), read_runs([again]) if again else None
    base_label, *labels = _labels([base, *heads])
    comparisons = []
    for label, folder in zip(labels, heads, strict=True):
        compared = compare_records(before, read_runs([folder]), rules, second_base)
        comparisons.append(replace(compared, base=base_label, head=label))
    return comparisons


def compare_records(before: Runs, after: Runs, rules: Rules, again: Runs | None = None) -> Comparison:
    """As `compare_runs`, for runs that are already read."""
    metric = rules.metric
    unit = unit_of(metric, [*before.records, *after.records])
    cells = pairs_of(samples_of(before.launches, metric), samples_of(after.launches, metric))
    verdicts = _judge(cells, replace(rules, aa=samples_of(again.launches, metric)) if again else rules)
    notes = (*before.notes, *after.notes, *_order_notes(before, after))
    return Comparison("base", "head", metric, unit, rules.alpha, tuple(verdicts), notes)


def compare_engines(runs: Sequence[Path], against: str, rules: Rules) -> list[Comparison]:
    """Compares the cells of each workload of each run with the cell named `against`, or with that engine's fastest one.

    Excludes simulated and projected cells, and references other than one that `against` names. Holm's correction covers
    a workload. Raises HarnessError where no workload has such a cell and another one.
    """
    comparisons, metric = [], rules.metric
    engines: set[str] = set()
    for run in map(read_runs, ([folder] for folder in runs)):
        unit = unit_of(metric, run.records)
        samples = samples_of(run.records, metric).values()
        engines |= {one_line(sample.spec.engine) for sample in samples}
        measured = (sample for sample in samples if not sample.virtual)
        for workload, cells in grouped(measured, lambda sample: workload_of(sample.records[-1])).items():
            named = [s for s in cells if s.speeds and against == s.spec.name]
            named = named or [s for s in cells if s.speeds and against == s.spec.engine and not s.spec.reference]
            if not named:
                continue
            base = max(named, key=lambda s: median(s.speeds) or 0)
            others = [s for s in cells if s is not base and not s.spec.reference]
            if others:
                verdicts = tuple(_judge([(base, s) for s in others], replace(rules, engines=True)))
                label = one_line(base.spec.name)
                comparisons.append(Comparison(label, workload, metric, unit, rules.alpha, verdicts, run.notes))
    if not comparisons:
        known = ", ".join(sorted(engines))
        raise HarnessError(f"no measured cell or engine named {against!r} with others to compare; engines: {known}")
    return comparisons


def _judge(pairs: Sequence[tuple[Sample | None, Sample | None]], rules: Rules) -> list[CellVerdict]:
    """The verdict of each (base, head) pair; Holm's correction covers the pairs that need a test."""
    untested = [_without_test(a, b, rules) for a, b in pairs]
    tested = [(a, b) for (a, b), known in zip(pairs, untested, strict=True) if not known and a and b and not a.virtual]
    adjusted = iter(holm([mann_whitney(a.speeds, b.speeds) for a, b in tested]))
    verdicts = []
    for (a, b), known in zip(pairs, untested, strict=True):
        verdict = _blank(a, b, rules.metric)
        if known:
            verdict = _decided(verdict, *known)
        elif a and b:
            if a.virtual:
                verdict = _simulated(verdict, a, b)
            else:
                verdict = _tested(verdict, a, b, next(adjusted), len(tested), rules)
            verdict = _with_remarks(verdict, a, b, rules)
        if rules.engines:
            verdict = replace(verdict, verdict=_BETWEEN_ENGINES.get(verdict.verdict, verdict.verdict))
        verdicts.append(verdict)
    return verdicts


def _blank(a: Sample | None, b: Sample | None, metric: str) -> CellVerdict:
    """A pair's names, launches and medians, to be completed by a verdict."""
    cell = b or a
    assert cell is not None  # a pair has at least one side
    last = cell.records[-1]
    base, head = (median([value_of(r, metric) for r in side.ok]) if side else None for side in (a, b))
    launches = (len(a.speeds), len(b.speeds)) if a and b else (0, 0)
    names = name_of(last), one_line(last.spec.engine), workload_of(last)
    return CellVerdict(*names, "not comparable", "", base, head, *launches)


def _decided(verdict: CellVerdict, kind: Verdict, reason: str) -> CellVerdict:
    return replace(verdict, verdict=kind, reason=reason)


def _without_test(a: Sample | None, b: Sample | None, rules: Rules) -> tuple[Verdict, str] | None:
    """A verdict that needs no statistics, with its reason; None where the figures must be compared."""
    if a is None:
        return "new", "not in the base"
    if b is None:
        return "not comparable", "not in the head"
    if not rules.engines and (changed := changed_cell(a.records[-1], b.records[-1])):
        return "not comparable", f"another cell of the same name: {changed}"
    if a.virtual != b.virtual:
        return "not comparable", "one side is simulated or projected, the other measured"
    if items := differing(a.records, b.records, rules.allow, rules.engines):
        return "not comparable", f"another environment: {'; '.join(items)}"
    return _by_failures(a, b, rules.alpha, rules.engines)


def _by_failures(a: Sample, b: Sample, alpha: float, engines: bool) -> tuple[Verdict, str] | None:
    """The verdict from statuses; None where both sides have figures and the head does not fail more than the base.

    One failure where the base has none is a regression. Where the base fails too, the head must fail significantly more
    often (Fisher's exact test, one-sided).
    """
    if b.expected_failure and (a.expected_failure or engines):
        place = "" if engines else " on both sides"
        return "as expected", f"{b.failed[-1].status}{place}, as the suite expects"
    if b.failed:
        failure = f"{b.failed[-1].status}: {one_line(b.failed[-1].reason)}"
        count = f"{len(b.failed)} of {plural(len(b.ended), 'launch', 'launches')}"
        if a.expected_failure:
            return "regression", f"{count} fail, but not as the suite expects, {failure}"
        if not a.speeds:
            return "not comparable", f"the base has no figure, the head fails: {failure}"
        if not a.failed:
            return "regression", f"{count} newly fail, {failure}"
        if not b.speeds or more_failures(a, b) < alpha:
            return "regression", f"{count} fail ({len(a.failed)} of {len(a.ended)} in the base), {failure}"
    elif a.failed and not a.speeds and b.speeds:
        return "improvement", f"no longer fails ({a.failed[-1].status} in the base)"
    for side, sample in (("base", a), ("head", b)):
        if not sample.speeds:
            return "not comparable", f"the {side} has no launch with this figure"
        if lacking := len(sample.ok) - len(sample.speeds):
            count = f"{lacking} of {plural(len(sample.ok), 'launch', 'launches')}"
            return "not comparable", f"{count} of the {side} lack this figure"
    return None


def more_failures(a: Sample, b: Sample) -> float:
    """One-sided p of Fisher's exact test that the head `b` fails more often than the base `a`."""
    from scipy.stats import fisher_exact

    counts = [[len(side.failed), len(side.ended) - len(side.failed)] for side in (b, a)]
    return float(fisher_exact(counts, alternative="greater").pvalue)


def _simulated(verdict: CellVerdict, a: Sample, b: Sample) -> CellVerdict:
    """The verdict on simulated figures, which have no noise."""
    ratio = hodges_lehmann(a.speeds, b.speeds)
    verdict = replace(verdict, ratio=ratio, threshold=LEAST_EFFECT)
    if max(ratio, 1 / ratio) - 1 <= LEAST_EFFECT:
        return _decided(verdict, "no change", f"simulated: exact, and within {LEAST_EFFECT:.0%}")
    return _decided(verdict, "regression" if ratio < 1 else "improvement", f"simulated: {_times(ratio)}")


def _tested(verdict: CellVerdict, a: Sample, b: Sample, p: float, tests: int, rules: Rules) -> CellVerdict:
    """The verdict on measured figures of both sides; `p` is adjusted for `tests` tests."""
    ratio, alpha, margin = ratio_of(a.speeds, b.speeds), rules.alpha, rules.margin
    floor = _noise_floor(a, b, rules.aa)
    threshold = max(LEAST_EFFECT, 2 * (floor or 0.0))
    verdict = replace(verdict, ratio=ratio.ratio, low=ratio.low, high=ratio.high, p=p, noise_floor=floor,
                      threshold=threshold)  # fmt: skip
    significant = p < alpha and ratio.excludes_one
    if significant and max(ratio.ratio, 1 / ratio.ratio) - 1 > threshold:
        return _decided(verdict, "regression" if ratio.ratio < 1 else "improvement", _times(ratio.ratio))
    if p >= alpha and smallest_p(len(a.speeds), len(b.speeds)) * tests >= alpha:
        needed = launches_needed(tests, alpha)
        why = f"{len(a.speeds)} and {len(b.speeds)} launches cannot give p < {alpha:g} over {plural(tests, 'cell')}"
        return _decided(verdict, "inconclusive", f"{why}: run {needed} on each side")
    if ratio.low is None or ratio.low < 1 - margin:
        why = f"a slowdown of {margin:.0%} is not excluded (up to {1 - (ratio.low or 0.0):.1%} is possible)"
        return _decided(verdict, "inconclusive", f"{why}: run more launches, or reduce the noise")
    effect = (
        f"{_times(ratio.ratio)}, below the threshold of {threshold:.1%}" if significant else "no significant difference"
    )
    return _decided(verdict, "no change", f"{effect}; a slowdown of {margin:.0%} is excluded")


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


def _times(ratio: float) -> str:
    return f"{abs(ratio - 1):.1%} {'slower' if ratio < 1 else 'faster'}"


def _with_remarks(verdict: CellVerdict, a: Sample, b: Sample, rules: Rules) -> CellVerdict:
    """Adds a loss of accuracy, failures, different answers and limits, and disturbances to a verdict."""
    sides = (("base", a), ("head", b))
    remarks = []
    if a.failed or b.failed:
        counts = (f"{len(sample.failed)} of {len(sample.ended)} in the {side}" for side, sample in sides)
        remarks.append(f"launches fail: {', '.join(counts)}")
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
    for side, sample in sides:
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
