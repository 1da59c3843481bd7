"""Judges the speeds of pairs of cells: tests, intervals, noise, disturbed launches, and the order of launches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import geometric_mean

from reports.environment import differing
from reports.records import Runs, name_of, workload_of
from reports.samples import THROUGHPUT, Sample, in_turns, samples_of
from reports.stats import (
    ALPHA,
    Ratio,
    holm,
    launches_needed,
    mann_whitney,
    noise_floor,
    quotient_of_medians,
    ratio_of,
    ratio_of_runs,
    smallest_p,
)
from reports.text import number, one_line, plural
from reports.verdicts import LEAST_EFFECT, MARGIN, MULTIPLE, CellVerdict, Verdict


@dataclass(frozen=True)
class Rules:
    """How to judge cells.

    `allow`: environment items that may differ, such as `packages.torch`. `alpha`: the level over all cells. `margin`:
    the slowdown that "no change" must exclude. `again`: other runs of the base, whose differences from it are noise
    (A/A). `engines`: whether the sides are engines of one run.
    """

    metric: str = THROUGHPUT
    allow: Sequence[str] = ()
    alpha: float = ALPHA
    margin: float = MARGIN
    again: Sequence[Runs] = ()
    engines: bool = False

    @cached_property
    def aa(self) -> list[dict[str, Sample]]:
        """The samples of each A/A run."""
        return [samples_of(run.launches, self.metric) for run in self.again]


DEFAULT = Rules()


def by_speed(pairs: Sequence[tuple[Sample, Sample]], rules: Rules) -> list[CellVerdict]:
    """The verdicts of undisturbed launches; inconclusive where the disturbed ones decide, or nothing else is left.

    A launch is disturbed by what others did, not by its speed, so leaving it out hides no slowdown.
    """
    verdicts = _tests(pairs, rules)
    disturbed = {i: (a.undisturbed, b.undisturbed) for i, (a, b) in enumerate(pairs) if a.disturbed or b.disturbed}
    if not disturbed:
        return verdicts
    quiet = [disturbed.get(i, pair) for i, pair in enumerate(pairs)]
    calm = iter(_tests([(a, b) for a, b in quiet if a.speeds and b.speeds], rules))
    for i, (sides, every) in enumerate(zip(quiet, verdicts, strict=True)):
        if lacking := [name for name, side in zip(("base", "head"), sides, strict=True) if not side.speeds]:
            why = f"others disturbed every launch of the {' and the '.join(lacking)}"
            verdicts[i] = decided(every, "inconclusive", f"{why} (with them: {every.reason}): run again without them")
            continue
        verdicts[i] = without = next(calm)
        if i in disturbed and every.verdict not in (without.verdict, "inconclusive"):
            why = f"disturbed launches decide: with them {every.verdict} ({every.reason}), without them"
            reason = f"{why} {without.verdict} ({without.reason}): run again without what disturbs"
            verdicts[i] = decided(without, "inconclusive", reason)
    return verdicts


def _tests(pairs: Sequence[tuple[Sample, Sample]], rules: Rules) -> list[CellVerdict]:
    """The verdict on the measured figures of each pair, with Holm's correction over those that can be tested."""
    evidence = [_evidence(a, b, rules) for a, b in pairs]
    adjusted = iter(holm([p for _, p in evidence if p is not None]))
    tests = sum(p is not None for _, p in evidence)
    return [_tested(a, b, ratio, None if p is None else next(adjusted), tests, rules)
            for (a, b), (ratio, p) in zip(pairs, evidence, strict=True)]  # fmt: skip


def _evidence(a: Sample, b: Sample, rules: Rules) -> tuple[Ratio, float | None]:
    """The ratio with its interval, and p; neither where the sides ran one after the other and no A/A run says how far
    runs drift."""
    if in_turns(a, b):
        return ratio_of(a.speeds, b.speeds), mann_whitney(a.speeds, b.speeds)
    if others := other_runs(a, rules):
        return ratio_of_runs([a.speeds, *(run.speeds for run in others)], b.speeds)
    return Ratio(quotient_of_medians(a.speeds, b.speeds)), None


def simulated(verdict: CellVerdict, a: Sample, b: Sample) -> CellVerdict:
    """The verdict on simulated figures, which have no noise."""
    ratio = Ratio(quotient_of_medians(a.speeds, b.speeds))
    verdict = replace(verdict, ratio=ratio.ratio, threshold=LEAST_EFFECT)
    if ratio.effect <= LEAST_EFFECT:
        return decided(verdict, "no change", f"simulated: exact, and within {LEAST_EFFECT:.0%}")
    return decided(verdict, "regression" if ratio.ratio < 1 else "improvement", f"simulated: {_times(ratio.ratio)}")


def _tested(a: Sample, b: Sample, ratio: Ratio, p: float | None, tests: int, rules: Rules) -> CellVerdict:
    """The verdict on measured figures of both sides; `p` is adjusted for `tests` tests."""
    floor = _noise_floor(a, b, rules)
    threshold = max(LEAST_EFFECT, 2 * (floor or 0.0))
    verdict = replace(blank(a, b, rules.metric), ratio=ratio.ratio, low=ratio.low, high=ratio.high, p=p,
                      noise_floor=floor, threshold=threshold)  # fmt: skip
    if p is not None and not in_turns(a, b):  # the ratio is to all runs of the base
        runs = [a.level, *(run.level for run in other_runs(a, rules))]
        verdict = replace(verdict, base=geometric_mean(filter(None, runs)))
    significant = p is not None and p < rules.alpha and ratio.excludes_one
    if why := _undecided(a, b, ratio, p, max(tests, 1), rules):
        return decided(verdict, "inconclusive", why)
    if significant and ratio.effect > threshold:
        return decided(verdict, "regression" if ratio.ratio < 1 else "improvement", _times(ratio.ratio))
    more = "run more launches, or reduce the noise" if in_turns(a, b) else "name more runs of the base with --aa"
    if ratio.low is None or ratio.low < 1 - rules.margin:
        why = f"a slowdown of {rules.margin:.0%} is not excluded (up to {1 - (ratio.low or 0.0):.1%} is possible)"
        return decided(verdict, "inconclusive", f"{why}: {more}")
    if ratio.low > 1 / (1 - rules.margin):
        why = f"{_times(ratio.ratio)}, but neither p nor a threshold of {threshold:.1%} is met"
        return decided(verdict, "inconclusive", f"{why}: {more}")
    effect = "no significant difference"
    if significant:
        effect = f"{_times(ratio.ratio)}, below the threshold of {threshold:.1%}"
    return decided(verdict, "no change", f"{effect}; a slowdown of {rules.margin:.0%} is excluded")


def _undecided(a: Sample, b: Sample, ratio: Ratio, p: float | None, tests: int, rules: Rules) -> str:
    """Why these launches decide nothing, whatever their figures are; empty where they may."""
    for side, sample in (("base", a), ("head", b)):
        if (factor := max(sample.speeds) / min(sample.speeds)) >= MULTIPLE:
            why = f"launches of the {side} differ by a factor of {number(factor)} without a known cause"
            return f"{why}: find it, or run again on a machine that does nothing else"
    turns = in_turns(a, b)
    possible = smallest_p(len(a.speeds), len(b.speeds)) * tests < rules.alpha
    if not possible and (p is None or (turns and p >= rules.alpha)):
        why = f"{len(a.speeds)} and {len(b.speeds)} launches cannot give p < {rules.alpha:g} over"
        needed = launches_needed(tests, rules.alpha)
        why = f"{why} {plural(tests, 'cell')}: run {needed} on each side"
        if rules.engines:
            return f"{why} (--set repeats={needed})"
        return why if turns else f"{why}, in turns (ci/interleave.sh)"
    if p is None:
        why = f"{_times(ratio.ratio)}, but the sides ran one after the other, so a drift of the machine counts as well"
        if rules.engines:
            return f"{why}: run both anew (harness run --fresh)"
        return f"{why}: run them in turns (ci/interleave.sh), or name other runs of the base with --aa"
    return ""


def _noise_floor(a: Sample, b: Sample, rules: Rules) -> float | None:
    """A/A noise: between halves of each side and, where the base ran again, between it and each other run."""
    halves = noise_floor(a.speeds, b.speeds)
    if not in_turns(a, b):
        return halves  # the interval has the difference of runs already
    runs = [Ratio(quotient_of_medians(a.speeds, run.speeds)).effect for run in other_runs(a, rules)]
    return max((halves or 0.0, *runs)) if runs else halves


def other_runs(a: Sample, rules: Rules) -> list[Sample]:
    """The cell's samples in the other runs of the base, but for those without figures or of another environment."""
    samples = [run[a.records[-1].fingerprint].undisturbed for run in rules.aa if a.records[-1].fingerprint in run]
    return [sample for sample in samples if sample.speeds and not differing(a.records, sample.records)]


def _times(ratio: float) -> str:
    return f"{abs(ratio - 1):.1%} {'slower' if ratio < 1 else 'faster'}"


def blank(a: Sample | None, b: Sample | None, metric: str) -> CellVerdict:
    """A pair's names, launches and medians, to be completed by a verdict."""
    cell = b or a
    assert cell is not None  # a pair has at least one side
    last = cell.records[-1]
    base, head = (side.level if side else None for side in (a, b))
    launches = (len(a.speeds), len(b.speeds)) if a and b else (0, 0)
    names = name_of(last), one_line(last.spec.engine), workload_of(last)
    return CellVerdict(*names, "not comparable", "", base, head, *launches)


def decided(verdict: CellVerdict, kind: Verdict, reason: str) -> CellVerdict:
    """`verdict` with its kind and reason."""
    return replace(verdict, verdict=kind, reason=reason)
