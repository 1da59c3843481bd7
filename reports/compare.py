"""Compares runs with a base, or engines with one of them: cell by cell, with known error rates.

The unit is a launch. A regression needs a quotient of medians whose interval excludes 1, an effect above max(3 %,
twice the A/A noise floor), and an exact Mann-Whitney p below alpha after Holm's correction over the cells. Sides that
ran one after the other are compared only with other runs of the base, and then the unit is a run.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.api import HarnessError
from reports.accuracy import lost_accuracy
from reports.environment import differing
from reports.records import Runs, read_runs, workload_of
from reports.samples import Sample, changed_cell, pairs_of, samples_of, unit_of
from reports.speed import DEFAULT, Rules, blank, by_speed, decided, other_runs, simulated
from reports.summary import disturbance
from reports.text import grouped, median, one_line, plural
from reports.verdicts import CellVerdict, Comparison, Verdict

#: The verdicts of a comparison of engines, where a slower engine is no regression.
_BETWEEN_ENGINES: dict[Verdict, Verdict] = {"regression": "behind", "improvement": "ahead"}


def compare_runs(base: Path, heads: Sequence[Path], rules: Rules = DEFAULT) -> list[Comparison]:
    """Compares each of `heads` with `base`; all are run directories.

    Raises HarnessError for directories without records and unknown metrics.
    """
    before = read_runs([base])
    base_label, *labels = _labels([base, *heads])
    comparisons = []
    for label, folder in zip(labels, heads, strict=True):
        compared = compare_records(before, read_runs([folder]), rules)
        comparisons.append(replace(compared, base=base_label, head=label))
    return comparisons


def compare_records(before: Runs, after: Runs, rules: Rules = DEFAULT) -> Comparison:
    """As `compare_runs`, for runs that are already read."""
    unit = unit_of(rules.metric, [*before.records, *after.records])
    cells = pairs_of(samples_of(before.launches, rules.metric), samples_of(after.launches, rules.metric))
    return Comparison("base", "head", rules.metric, unit, rules.alpha, tuple(_judge(cells, rules)),
                      (*before.notes, *after.notes))  # fmt: skip


def compare_engines(runs: Sequence[Path], against: str, rules: Rules = DEFAULT) -> list[Comparison]:
    """Compares the cells of each workload of each run with the cell named `against`, or with that engine's fastest one.

    Excludes simulated cells, and references other than one that `against` names. Holm's correction covers
    a workload. Raises HarnessError where no workload has such a cell and another one.
    """
    comparisons, engines = [], set[str]()
    for run in map(read_runs, ([folder] for folder in runs)):
        unit = unit_of(rules.metric, run.records)
        samples = samples_of(run.records, rules.metric).values()
        engines |= {one_line(s.spec.engine) for s in samples}
        groups = grouped((s for s in samples if not s.virtual), lambda s: workload_of(s.records[-1]))
        for workload, cells in groups.items():
            named = [s for s in cells if s.speeds and against == s.spec.name]
            named = named or [s for s in cells if s.speeds and against == s.spec.engine and not s.spec.reference]
            if not named:
                continue
            base = max(named, key=lambda s: median(s.speeds) or 0)
            others = [s for s in cells if s is not base and not s.spec.reference]
            if others:
                verdicts = _judge([(base, s) for s in others], replace(rules, engines=True))
                comparisons.append(Comparison(one_line(base.spec.name), workload, rules.metric, unit, rules.alpha,
                                              tuple(verdicts), run.notes))  # fmt: skip
    if not comparisons:
        known = ", ".join(sorted(engines))
        raise HarnessError(f"no measured cell or engine named {against!r} with others to compare; engines: {known}")
    return comparisons


def _judge(pairs: Sequence[tuple[Sample | None, Sample | None]], rules: Rules) -> list[CellVerdict]:
    """The verdict of each (base, head) pair; Holm's correction covers the pairs that need a test."""
    untested = [_without_test(a, b, rules) for a, b in pairs]
    tested = [(a, b) for (a, b), known in zip(pairs, untested, strict=True) if not known and a and b and not a.virtual]
    speeds = iter(by_speed(tested, rules))
    verdicts = []
    for (a, b), known in zip(pairs, untested, strict=True):
        verdict = blank(a, b, rules.metric)
        if known:
            verdict = decided(verdict, *known)
        elif a and b:
            verdict = simulated(verdict, a, b) if a.virtual else next(speeds)
            verdict = _with_remarks(verdict, a, b, rules)
        if rules.engines:
            verdict = replace(verdict, verdict=_BETWEEN_ENGINES.get(verdict.verdict, verdict.verdict))
        verdicts.append(verdict)
    return verdicts


def _without_test(a: Sample | None, b: Sample | None, rules: Rules) -> tuple[Verdict, str] | None:
    """A verdict that needs no statistics, with its reason; None where the figures must be compared."""
    if a is None:
        return "new", "not in the base"
    if b is None:
        return "not comparable", "not in the head"
    if not rules.engines and (changed := changed_cell(a.records[-1], b.records[-1])):
        return "not comparable", f"another cell of the same name: {changed}"
    if a.virtual != b.virtual:
        return "not comparable", "one side is simulated, the other measured"
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

    table = [[len(side.failed), len(side.ended) - len(side.failed)] for side in (b, a)]
    return float(fisher_exact(table, alternative="greater").pvalue)


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
    if lacking := len(rules.again) - len(other_runs(a, rules)):
        remarks.append(f"{plural(lacking, 'other run')} of the base without comparable figures for this cell")
    for side, sample in sides:
        if sample.disturbed:
            of = f"{len(sample.disturbed)} of {plural(len(sample.ok), 'launch', 'launches')} of the {side}"
            left_out = "left out" if sample.undisturbed.speeds else "disturbed"
            remarks.append(f"{of} {left_out}: {disturbance(sample.disturbed)}")
    return replace(verdict, remarks=tuple(remarks))


def _labels(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with more of the path where names are equal."""
    for depth in range(1, 8):
        names = ["/".join(f.absolute().parts[-depth:]) for f in folders]
        if len(set(names)) == len(names):
            return [one_line(n) for n in names]
    return [one_line(str(f)) for f in folders]
