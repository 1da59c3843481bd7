"""A workload's result in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from reports.stats import Ratio, ratio_of
from reports.summary import CellSummary, ranked, rival_of
from reports.text import TIMES_SIGN, columns_of, number


def headline(rows: Sequence[CellSummary]) -> str:
    """One sentence: the fastest cell, its ratio to its rival, its share of the roofline, and its throughput."""
    order = ranked(rows)
    if not order:
        return "No cell has a result that can be ranked." if len(rows) > 1 else "The cell has no result."
    best = order[0]
    kind = " (simulated)" if best.simulated else " (projected)" if best.projected else ""
    within = " within the limit" if best.limit_bytes else ""
    parts = []
    rival = rival_of(best, order)
    if rival and rival.throughput:
        role = "the next fastest cell" if rival.engine == best.engine else "the fastest of another engine"
        parts.append(f"{_times(ratio_of(rival.throughput, best.throughput), best.simulated)} {rival.name}, {role}")
    if best.bound_fraction is not None:
        parts.append(f"at {number(best.bound_fraction * 100)} % of the roofline ({best.limited_by})")
    speed = f"{number(best.median or 0)} tok/s{within}{kind}"
    return f"{best.name} is {', and '.join(parts)}: {speed}." if parts else f"{best.name}: {speed}."


def _times(ratio: Ratio, exact: bool) -> str:
    """The ratio with its interval, or why it has none; an `exact` ratio is simulated and needs none."""
    times = f"{number(ratio.ratio)}{TIMES_SIGN}"
    if exact:
        return times
    if ratio.low is None or ratio.high is None:
        return f"{times} (too few launches for an interval)"
    caveat = "" if ratio.excludes_one else " (not significant: the interval includes 1)"
    return f"{times} [{', '.join(columns_of([ratio.low, ratio.high]))}]{caveat}"
