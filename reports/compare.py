"""Judges runs against a base, or engines against one of them: cell by cell, with errors that are known.

The unit is a launch. A regression needs a Hodges-Lehmann ratio whose bootstrap interval excludes 1, an effect above
max(3 %, twice the A/A noise floor), and an exact Mann-Whitney p that survives Holm over the suite's cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.api import HarnessError
from reports.accuracy import lost_accuracy
from reports.cells import workload_of
from reports.environment import differing
from reports.failures import by_failures, failure_remarks
from reports.records import Runs, read_runs
from reports.samples import THROUGHPUT, Sample, changed_cell, in_unit, labelled, pairs_of, samples_of, unit_of
from reports.stats import ALPHA, hodges_lehmann, holm, launches_needed, mann_whitney, noise_floor, ratio_of, smallest_p
from reports.summary import DISTURBED, others_share
from reports.text import median, one_line, plural
from reports.verdicts import LEAST_EFFECT, MARGIN, CellVerdict, Comparison, Verdict

#: What is a fault of a branch is none of an engine that is held against another.
_BETWEEN_ENGINES: dict[Verdict, Verdict] = {"regression": "behind", "improvement": "ahead"}


def compare_runs(
    base: Path,
    heads: Sequence[Path],
    metric: str = THROUGHPUT,
    again: Path | None = None,
    allow: Sequence[str] = (),
    alpha: float = ALPHA,
    margin: float = MARGIN,
) -> list[Comparison]:
    """Each of `heads` against `base`, all of them run directories.

    `again`: another run of the base, whose distance from it is noise (A/A). `allow`: items of the environment that may
    differ, such as `packages.torch`. Raises HarnessError for directories without records and unknown metrics.
    """
    before, twice = read_runs([base]), read_runs([again]) if again else None
    first, *labels = _labels([base, *heads])
    return [
        replace(
            compare_records(before, read_runs([folder]), metric, twice, allow, alpha, margin), base=first, head=label
        )
        for label, folder in zip(labels, heads, strict=True)
    ]


def compare_records(
    before: Runs,
    after: Runs,
    metric: str = THROUGHPUT,
    again: Runs | None = None,
    allow: Sequence[str] = (),
    alpha: float = ALPHA,
    margin: float = MARGIN,
) -> Comparison:
    """As `compare_runs`, of what was read already."""
    unit = unit_of(metric, [*before.records, *after.records])
    cells = pairs_of(samples_of(before.launches, metric), samples_of(after.launches, metric))
    aa = None if again is None else samples_of(again.launches, metric)
    judged = _judge(cells, metric, aa, allow, alpha, margin)
    notes = (*before.notes, *after.notes, *_order(before, after))
    return Comparison("base", "head", metric, unit, alpha, tuple(judged), notes)


def compare_engines(
    runs: Sequence[Path], against: str, metric: str = THROUGHPUT, alpha: float = ALPHA, margin: float = MARGIN
) -> list[Comparison]:
    """The cells of each workload of each run against one of them: the one of this name, or the fastest of this engine.

    References and what was not measured stand aside, unless a reference is asked for by name. Holm's correction is over
    a workload. Raises HarnessError where no workload has such a cell and another.
    """
    found, engines = [], set()
    for read in map(read_runs, ([run] for run in runs)):
        unit = unit_of(metric, read.records)
        groups: dict[str, list[Sample]] = {}
        for sample in samples_of(read.records, metric).values():
            engines.add(one_line(sample.spec.engine))
            if not sample.virtual:
                groups.setdefault(workload_of(sample.records[-1]), []).append(sample)
        for workload, cells in groups.items():
            named = [s for s in cells if s.speeds and against == s.spec.name]
            named = named or [s for s in cells if s.speeds and against == s.spec.engine and not s.spec.reference]
            if not named:
                continue
            chosen = max(named, key=lambda s: median(s.speeds) or 0)
            others = [s for s in cells if s is not chosen and not s.spec.reference]
            if others:
                judged = _judge([(chosen, s) for s in others], metric, None, (), alpha, margin, engines=True)
                label = one_line(chosen.spec.name)
                found.append(Comparison(label, workload, metric, unit, alpha, tuple(judged), read.notes))
    if not found:
        known = ", ".join(sorted(engines))
        raise HarnessError(f"no measured cell or engine named {against!r} with others beside it; engines: {known}")
    return found


def _judge(
    pairs: Sequence[tuple[Sample | None, Sample | None]],
    metric: str,
    aa: Mapping[str, Sample] | None,
    allow: Sequence[str],
    alpha: float,
    margin: float,
    engines: bool = False,
) -> list[CellVerdict]:
    """First what needs no test, then the rest together, as Holm's correction is over all that is tested."""
    plain = [_without_test(a, b, allow, alpha, engines) for a, b in pairs]
    left = [(a, b) for (a, b), found in zip(pairs, plain, strict=True) if found is None and a and b]
    adjusted = iter(holm([mann_whitney(a.speeds, b.speeds) for a, b in left if not a.virtual]))
    tests = sum(not a.virtual for a, _ in left)
    verdicts = []
    for (a, b), found in zip(pairs, plain, strict=True):
        shown = found
        if shown is None:
            assert a is not None and b is not None  # one side alone is a verdict by itself
            shown = (
                _of_exact(a, b) if a.virtual else _tested(a, b, next(adjusted), tests, _floor(a, b, aa), alpha, margin)
            )
            shown = _with_remarks(shown, a, b, aa, engines)
        if engines:
            shown = replace(shown, verdict=_BETWEEN_ENGINES.get(shown.verdict, shown.verdict))
        verdicts.append(in_unit(shown, a, b, metric))
    return verdicts


def _without_test(
    a: Sample | None, b: Sample | None, allow: Sequence[str], alpha: float, engines: bool
) -> CellVerdict | None:
    """What is plain before any statistics; None where the figures must be compared."""
    shown = labelled(b or a)
    if a is None:
        return replace(shown, verdict="new", reason="not in the base")
    if b is None:
        return replace(shown, verdict="not comparable", reason="not in the head")
    shown = replace(shown, base_launches=len(a.speeds), head_launches=len(b.speeds))
    if not engines and (changed := changed_cell(a.records[-1], b.records[-1])):
        return replace(shown, verdict="not comparable", reason=f"another cell of the same name: {changed}")
    if a.virtual != b.virtual:
        return replace(shown, verdict="not comparable", reason="one side is simulated or projected, the other measured")
    if fields := differing(a.records, b.records, allow, engines):
        return replace(shown, verdict="not comparable", reason=f"another environment: {'; '.join(fields)}")
    return by_failures(shown, a, b, alpha, engines)


def _of_exact(a: Sample, b: Sample) -> CellVerdict:
    """Of simulations: there is no noise, and what they say is theirs."""
    ratio = hodges_lehmann(a.speeds, b.speeds)
    shown = replace(_counted(a, b), ratio=ratio, threshold=LEAST_EFFECT)
    if max(ratio, 1 / ratio) - 1 <= LEAST_EFFECT:
        return replace(shown, verdict="no change", reason=f"simulated: exact, and within {LEAST_EFFECT:.0%}")
    return replace(shown, verdict="regression" if ratio < 1 else "improvement", reason=f"simulated: {_times(ratio)}")


def _tested(
    a: Sample, b: Sample, p: float, tests: int, floor: float | None, alpha: float, margin: float
) -> CellVerdict:
    """The verdict of figures on both sides; `p` is adjusted for so many tests."""
    found = ratio_of(a.speeds, b.speeds)
    threshold = max(LEAST_EFFECT, 2 * (floor or 0.0))
    shown = replace(_counted(a, b), ratio=found.ratio, low=found.low, high=found.high, p=p, noise_floor=floor,
                    threshold=threshold)  # fmt: skip
    sure = p < alpha and found.excludes_one
    if sure and max(found.ratio, 1 / found.ratio) - 1 > threshold:
        return replace(shown, verdict="regression" if found.ratio < 1 else "improvement", reason=_times(found.ratio))
    if p >= alpha and smallest_p(len(a.speeds), len(b.speeds)) * tests >= alpha:
        needed = launches_needed(tests, alpha)
        why = f"{len(a.speeds)} and {len(b.speeds)} launches cannot give p < {alpha:g} over {plural(tests, 'cell')}"
        return replace(shown, verdict="inconclusive", reason=f"{why}: run {needed} on each side")
    if found.low is None or found.low < 1 - margin:
        why = f"a slowdown of {margin:.0%} is not excluded (up to {1 - (found.low or 0.0):.1%} is possible)"
        return replace(shown, verdict="inconclusive", reason=f"{why}: run more launches, or find the noise")
    small = f"{_times(found.ratio)}, less than the {threshold:.1%} that counts" if sure else "no difference found"
    return replace(shown, verdict="no change", reason=f"{small}; a slowdown of {margin:.0%} is excluded")


def _floor(a: Sample, b: Sample, aa: Mapping[str, Sample] | None) -> float | None:
    """A/A noise: of the halves of each side and, where the base ran twice, of both runs."""
    halves = noise_floor(a.speeds, b.speeds)
    again = _again(a, aa)
    if again is None:
        return halves
    ratio = hodges_lehmann(a.speeds, again.speeds)
    return max(halves or 0.0, max(ratio, 1 / ratio) - 1)


def _again(a: Sample, aa: Mapping[str, Sample] | None) -> Sample | None:
    """The same cell in the other run of the base, if it says anything."""
    again = (aa or {}).get(a.records[-1].fingerprint)
    return again if again and again.speeds and not differing(a.records, again.records) else None


def _counted(a: Sample, b: Sample) -> CellVerdict:
    return replace(labelled(b), base_launches=len(a.speeds), head_launches=len(b.speeds))


def _times(ratio: float) -> str:
    return f"{abs(ratio - 1):.1%} {'slower' if ratio < 1 else 'faster'}"


def _with_remarks(
    shown: CellVerdict, a: Sample, b: Sample, aa: Mapping[str, Sample] | None, engines: bool
) -> CellVerdict:
    """What else differs: failures, answers and their worth, limits, and what disturbed the measurement."""
    remarks = failure_remarks(a, b)
    lost = "" if engines else lost_accuracy(a.records, b.records)
    if lost:
        shown = replace(shown, verdict="regression", reason=f"{lost}; speed: {shown.reason}")
    truth: dict[str, set[str]] = {}  # of an engine that answers near ties now so, now so, all that it said
    for t in (t for r in a.ok for t in r.requests if t.digest):
        truth.setdefault(t.id, set()).add(t.digest)
    mine = [t.digest in truth[t.id] for r in b.ok for t in r.requests if t.id in truth]
    if changed := mine.count(False):
        remarks.append(f"{changed} of {len(mine)} answers are none of the base's")
    if engines and a.spec.limits != b.spec.limits:
        remarks.append("other limits than the base's")
    if aa is not None and _again(a, aa) is None:
        remarks.append("the other run of the base says nothing of this cell")
    for side, sample in (("base", a), ("head", b)):
        if (share := others_share(sample.ok)) > DISTURBED:
            remarks.append(f"other processes took up to {share:.0%} of the CPU beside the {side}")
    return replace(shown, remarks=tuple(remarks))


def _order(before: Runs, after: Runs) -> list[str]:
    """Whether one side ran after the other, so that a machine that drifts looks like a difference."""
    times = [sorted(r.started_at for r in side.records if r.started_at) for side in (before, after)]
    if not all(times) or (times[0][-1] >= times[1][0] and times[1][-1] >= times[0][0]):
        return []
    return ["The sides ran one after the other, not interleaved: what the machine did meanwhile counts as difference."]


def _labels(folders: Sequence[Path]) -> list[str]:
    """Folders by name, by more of their path where names are the same."""
    for depth in range(1, 8):
        names = ["/".join(f.absolute().parts[-depth:]) for f in folders]
        if len(set(names)) == len(names):
            return [one_line(n) for n in names]
    return [one_line(str(f)) for f in folders]
