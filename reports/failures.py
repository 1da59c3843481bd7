"""Verdicts from statuses alone: cells that fail on one side, on both, or as their suite expects."""

from __future__ import annotations

import math
from dataclasses import replace

from reports.samples import Sample
from reports.text import one_line, plural
from reports.verdicts import CellVerdict


def by_failures(verdict: CellVerdict, a: Sample, b: Sample, alpha: float, engines: bool) -> CellVerdict | None:
    """The verdict from statuses; None where both sides have figures and the head does not fail more than the base.

    One failure where the base has none is a regression. Where the base fails too, the head must fail significantly more
    often (Fisher's exact test, one-sided).
    """
    if b.expected_failure and (a.expected_failure or engines):
        place = "" if engines else " on both sides"
        return replace(verdict, verdict="as expected", reason=f"{b.failed[-1].status}{place}, as the suite expects")
    if b.failed:
        failure = f"{b.failed[-1].status}: {one_line(b.failed[-1].reason)}"
        count = f"{len(b.failed)} of {plural(len(b.ended), 'launch', 'launches')}"
        if a.expected_failure:
            reason = f"{count} fail, but not as the suite expects, {failure}"
            return replace(verdict, verdict="regression", reason=reason)
        if a.speeds and not a.failed:
            return replace(verdict, verdict="regression", reason=f"{count} newly fail, {failure}")
        if a.speeds and (not b.speeds or more_failures(a, b) < alpha):
            before = f"{len(a.failed)} of {len(a.ended)} in the base"
            return replace(verdict, verdict="regression", reason=f"{count} fail ({before}), {failure}")
        if not a.speeds:
            reason = f"the base has no figure, the head fails: {failure}"
            return replace(verdict, verdict="not comparable", reason=reason)
    elif a.failed and not a.speeds and b.speeds:
        return replace(verdict, verdict="improvement", reason=f"no longer fails ({a.failed[-1].status} in the base)")
    for side, sample in (("base", a), ("head", b)):
        if not sample.speeds:
            return replace(verdict, verdict="not comparable", reason=f"the {side} has no launch with this figure")
        if lacking := len(sample.ok) - len(sample.speeds):
            count = f"{lacking} of {plural(len(sample.ok), 'launch', 'launches')}"
            return replace(verdict, verdict="not comparable", reason=f"{count} of the {side} lack this figure")
    return None


def failure_remarks(a: Sample, b: Sample) -> list[str]:
    """A remark on failed launches of a cell whose speeds are compared."""
    if not a.failed and not b.failed:
        return []
    counts = [f"{len(s.failed)} of {len(s.ended)} in the {side}" for side, s in (("base", a), ("head", b))]
    return [f"launches fail: {', '.join(counts)}"]


def more_failures(a: Sample, b: Sample) -> float:
    """One-sided p of Fisher's exact test that the head `b` fails more often than the base `a`."""
    failed, launches = len(a.failed) + len(b.failed), len(a.ended) + len(b.ended)
    ways = math.comb(launches, len(b.ended))
    tail = range(len(b.failed), min(failed, len(b.ended)) + 1)
    return sum(math.comb(failed, k) * math.comb(launches - failed, len(b.ended) - k) for k in tail) / ways
