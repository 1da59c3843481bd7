"""Verdicts that need no speeds: cells that fail on one side, on both, or as their suite says."""

from __future__ import annotations

import math
from dataclasses import replace

from reports.samples import Sample
from reports.text import one_line, plural
from reports.verdicts import CellVerdict


def by_failures(shown: CellVerdict, a: Sample, b: Sample, alpha: float, engines: bool) -> CellVerdict | None:
    """The verdict of how launches ended; None where both sides have figures, and the head fails no more than the base.

    One failure where the base has none is a regression: a launch that worked every time no longer does. Where the base
    fails too, the head has to fail more often than chance would have it (Fisher's exact test, one-sided).
    """
    if b.expected and (a.expected or engines):
        where = "" if engines else " on both sides"
        return replace(shown, verdict="as expected", reason=f"{b.failed[-1].status}{where}, as its suite says")
    if b.failed:
        words = f"{b.failed[-1].status}: {one_line(b.failed[-1].reason)}"
        count = f"{len(b.failed)} of {plural(len(b.telling), 'launch', 'launches')}"
        if a.expected:
            reason = f"{count} fail in another way than the suite expects, {words}"
            return replace(shown, verdict="regression", reason=reason)
        if a.speeds and not a.failed:
            return replace(shown, verdict="regression", reason=f"{count} newly fail, {words}")
        if a.speeds and (not b.speeds or more_failures(a, b) < alpha):
            before = f"{len(a.failed)} of {len(a.telling)} in the base"
            return replace(shown, verdict="regression", reason=f"{count} fail ({before}), {words}")
        if not a.speeds:
            return replace(shown, verdict="not comparable", reason=f"the base has no figure, the head fails: {words}")
    elif a.failed and not a.speeds and b.speeds:
        return replace(shown, verdict="improvement", reason=f"no longer fails ({a.failed[-1].status} in the base)")
    for side, sample in (("base", a), ("head", b)):
        if not sample.speeds:
            return replace(shown, verdict="not comparable", reason=f"the {side} has no launch with this figure")
        if lacking := len(sample.ok) - len(sample.speeds):
            count = f"{lacking} of {plural(len(sample.ok), 'launch', 'launches')}"
            return replace(shown, verdict="not comparable", reason=f"{count} of the {side} lack this figure")
    return None


def failure_remarks(a: Sample, b: Sample) -> list[str]:
    """What must be known of a cell whose speeds are compared although launches of it failed."""
    if not a.failed and not b.failed:
        return []
    counts = [f"{len(s.failed)} of {len(s.telling)} in the {side}" for side, s in (("base", a), ("head", b))]
    return [f"launches fail: {', '.join(counts)}"]


def more_failures(a: Sample, b: Sample) -> float:
    """The chance that so many or more of all failures fall to the head (Fisher's exact test)."""
    failed, launches = len(a.failed) + len(b.failed), len(a.telling) + len(b.telling)
    ways = math.comb(launches, len(b.telling))
    tail = range(len(b.failed), min(failed, len(b.telling)) + 1)
    return sum(math.comb(failed, k) * math.comb(launches - failed, len(b.telling) - k) for k in tail) / ways
