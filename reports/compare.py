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
from reports.environment import differing
from reports.records import Runs, read_runs
from reports.samples import THROUGHPUT, Sample, changed_cell, in_unit, labelled, pairs_of, samples_of, unit_of
from reports.stats import ALPHA, holm, launches_needed, mann_whitney, noise_floor, ratio_of, smallest_p
from reports.summary import DISTURBED, others_share, workload_of
from reports.text import median, one_line, plural
from reports.verdicts import LEAST_EFFECT, MARGIN, CellVerdict, Comparison


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
    cells = pairs_of(samples_of(before.records, metric), samples_of(after.records, metric))
    aa = samples_of(again.records, metric) if again else {}
    judged = _judge(cells, metric, aa, allow, alpha, margin)
    notes = (*before.notes, *after.notes, *_order(before, after))
    return Comparison("base", "head", metric, unit, alpha, tuple(judged), notes)


def compare_engines(
    runs: Sequence[Path], against: str, metric: str = THROUGHPUT, alpha: float = ALPHA, margin: float = MARGIN
) -> list[Comparison]:
    """The cells of each workload in `runs` against one of them: the cell of this name, or the fastest of this engine.

    References and simulated cells stand aside. Raises HarnessError where no workload has such a cell.
    """
    read = read_runs(runs)
    groups: dict[str, dict[str, Sample]] = {}
    for key, sample in samples_of(read.records, metric).items():
        groups.setdefault(workload_of(sample.records[-1]), {})[key] = sample
    found = []
    for workload, cells in groups.items():
        named = [s for s in cells.values() if against in (s.records[-1].spec.name, s.records[-1].spec.engine)]
        measured = [s for s in named if s.speeds and not s.simulated]
        if not measured:
            continue
        chosen = max(measured, key=lambda s: median(s.speeds) or 0)
        others = [s for s in cells.values() if s is not chosen and not s.records[-1].spec.reference]
        judged = _judge([(chosen, s) for s in others if not s.simulated], metric, {}, (), alpha, margin, engines=True)
        label = one_line(chosen.records[-1].spec.name)
        unit = unit_of(metric, read.records)
        found.append(Comparison(label, workload, metric, unit, alpha, tuple(judged), read.notes))
    if not found:
        known = ", ".join(sorted({one_line(r.spec.engine) for r in read.records}))
        raise HarnessError(f"no measured cell or engine named {against!r} here; engines: {known}")
    return found


def _judge(
    pairs: Sequence[tuple[Sample | None, Sample | None]],
    metric: str,
    aa: Mapping[str, Sample],
    allow: Sequence[str],
    alpha: float,
    margin: float,
    engines: bool = False,
) -> list[CellVerdict]:
    """First what needs no test, then the rest together, as Holm's correction is over all that is tested."""
    plain = [_without_test(a, b, allow, engines) for a, b in pairs]
    tested = [i for i, found in enumerate(plain) if found is None and not _exactly_known(*pairs[i])]
    p_values = {i: mann_whitney(a.speeds, b.speeds) for i in tested if (a := pairs[i][0]) and (b := pairs[i][1])}
    adjusted = dict(zip(tested, holm([p_values[i] for i in tested]), strict=True))
    verdicts = []
    for i, ((a, b), found) in enumerate(zip(pairs, plain, strict=True)):
        shown = found or labelled(b or a)
        if found is None and a and b:
            again = aa.get(b.records[-1].fingerprint)
            shown = _with_answers(_tested(a, b, again, adjusted.get(i), len(tested), alpha, margin), a, b, engines)
        verdicts.append(in_unit(shown, a, b, metric))
    return verdicts


def _without_test(a: Sample | None, b: Sample | None, allow: Sequence[str], engines: bool) -> CellVerdict | None:
    """What is plain before any statistics; None where the figures must be compared."""
    shown = labelled(b or a)
    if a is None:
        return replace(shown, verdict="new", reason="not in the base")
    if b is None:
        return replace(shown, verdict="not comparable", reason="not in the head")
    shown = replace(shown, base_launches=len(a.speeds), head_launches=len(b.speeds))
    if not engines and (changed := changed_cell(a.records[-1], b.records[-1])):
        return replace(shown, verdict="not comparable", reason=f"another cell of the same name: {changed}")
    if a.simulated != b.simulated:
        return replace(shown, verdict="not comparable", reason="one side is simulated, the other measured")
    if fields := differing(a.records, b.records, allow, engines):
        return replace(shown, verdict="not comparable", reason=f"another environment: {'; '.join(fields)}")
    return _by_failures(shown, a, b)


def _by_failures(shown: CellVerdict, a: Sample, b: Sample) -> CellVerdict | None:
    if a.expected and b.expected:
        return replace(shown, verdict="as expected", reason=f"{b.failed[-1].status} on both sides, as its suite says")
    if b.failed and not a.failed:
        words = f"{b.failed[-1].status}: {one_line(b.failed[-1].reason)}"
        count = f"{len(b.failed)} of {plural(len(b.telling), 'launch', 'launches')} newly fail"
        return replace(shown, verdict="regression", reason=f"{count}, {words}")
    if a.failed and not b.failed and b.speeds:
        return replace(shown, verdict="improvement", reason=f"no longer fails ({a.failed[-1].status} in the base)")
    if a.failed and b.failed:
        words = f"{b.failed[-1].status}: {one_line(b.failed[-1].reason)}"
        return replace(shown, verdict="not comparable", reason=f"fails on both sides, {words}")
    if not a.speeds or not b.speeds:
        side = "base" if not a.speeds else "head"
        return replace(shown, verdict="not comparable", reason=f"the {side} has no launch with this figure")
    return None


def _tested(
    a: Sample, b: Sample, again: Sample | None, p: float | None, tests: int, alpha: float, margin: float
) -> CellVerdict:
    """The verdict of figures on both sides. `p` is None where both are exactly known, as simulations are."""
    shown = labelled(b)
    found = ratio_of(a.speeds, b.speeds)
    floor = None if p is None else _floor(a, b, again)
    threshold = max(LEAST_EFFECT, 2 * (floor or 0.0))
    shown = replace(
        shown, base_launches=len(a.speeds), head_launches=len(b.speeds), ratio=found.ratio, low=found.low,
        high=found.high, p=p, noise_floor=floor, threshold=threshold,
    )  # fmt: skip
    effect = max(found.ratio, 1 / found.ratio) - 1
    times = f"{abs(found.ratio - 1):.1%} {'slower' if found.ratio < 1 else 'faster'}"
    if p is None:
        if effect <= threshold:
            return replace(shown, verdict="no change", reason="simulated: exact, and within 3 %")
        return replace(shown, verdict="regression" if found.ratio < 1 else "improvement", reason=f"simulated: {times}")
    least = smallest_p(len(a.speeds), len(b.speeds))
    if least * tests >= alpha:
        needed = launches_needed(tests, alpha)
        why = f"{len(a.speeds)} and {len(b.speeds)} launches cannot give p < {alpha:g} over {plural(tests, 'cell')}"
        return replace(shown, verdict="inconclusive", reason=f"{why}: run {needed} on each side")
    if p < alpha and found.excludes_one and effect > threshold:
        return replace(shown, verdict="regression" if found.ratio < 1 else "improvement", reason=times)
    if found.low is None or found.low < 1 - margin:
        why = f"a slowdown of {margin:.0%} is not excluded (up to {1 - (found.low or 0.0):.1%} is possible)"
        return replace(shown, verdict="inconclusive", reason=f"{why}: run more launches, or find the noise")
    return replace(shown, verdict="no change", reason=f"no difference found; a slowdown of {margin:.0%} is excluded")


def _floor(a: Sample, b: Sample, again: Sample | None) -> float | None:
    """A/A noise: of the halves of each side and, where the base ran twice, of both runs."""
    halves = noise_floor(a.speeds, b.speeds)
    if again is None or not again.speeds:
        return halves
    ratio = ratio_of(a.speeds, again.speeds).ratio
    return max(halves or 0.0, max(ratio, 1 / ratio) - 1)


def _with_answers(shown: CellVerdict, a: Sample, b: Sample, engines: bool) -> CellVerdict:
    """What else differs: answers, their worth, and what disturbed the measurement."""
    remarks = []
    lost = lost_accuracy(a.records, b.records)
    if lost and not engines:
        shown = replace(shown, verdict="regression", reason=f"{lost}; speed: {shown.reason}")
    truth = {t.id: t.digest for r in a.records if r.status == "ok" for t in r.requests if t.digest}
    mine = [(t.digest, truth[t.id]) for r in b.records if r.status == "ok" for t in r.requests if t.id in truth]
    if changed := sum(x != y for x, y in mine):
        remarks.append(f"{changed} of {len(mine)} answers differ from the base's")
    for side, sample in (("base", a), ("head", b)):
        if (share := others_share([r for r in sample.records if r.status == "ok"])) > DISTURBED:
            remarks.append(f"other processes took up to {share:.0%} of the CPU beside the {side}")
    return replace(shown, remarks=tuple(remarks))


def _exactly_known(a: Sample | None, b: Sample | None) -> bool:
    return bool(a and b and a.simulated and b.simulated)


def _order(before: Runs, after: Runs) -> list[str]:
    """Whether one side ran after the other, so that a machine that drifts looks like a difference."""
    times = [sorted(r.started_at for r in side.records if r.started_at) for side in (before, after)]
    if not all(times) or (times[0][-1] >= times[1][0] and times[1][-1] >= times[0][0]):
        return []
    return ["The sides ran one after the other, not interleaved: what the machine did meanwhile counts as difference."]


def _labels(folders: Sequence[Path]) -> list[str]:
    """Folders by name, by more of their path where names are the same."""
    for depth in range(1, 8):
        names = ["/".join(f.resolve().parts[-depth:]) for f in folders]
        if len(set(names)) == len(names):
            return [one_line(n) for n in names]
    return [one_line(str(f)) for f in folders]
