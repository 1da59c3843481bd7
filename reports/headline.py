"""One sentence on a workload, for those who read no further."""

from __future__ import annotations

from collections.abc import Sequence

from reports.stats import Ratio, ratio_of
from reports.summary import CellSummary, ranked, rival_of
from reports.text import TIMES_SIGN, columns_of, number


def headline(rows: Sequence[CellSummary]) -> str:
    """One sentence on a workload: the fastest cell, by how much, and how far from what the machine allows."""
    order = ranked(rows)
    if not order:
        return "No cell gave a result that can be ranked." if len(rows) > 1 else "The cell gave no result."
    best = order[0]
    kind = " (simulated)" if best.simulated else " (projected)" if best.projected else ""
    within = " within the limit" if best.limit_bytes else ""
    parts = []
    rival = rival_of(best, order)
    if rival and rival.throughput:
        what = "the next" if rival.engine == best.engine else "the best of another engine"
        parts.append(f"{_times(ratio_of(rival.throughput, best.throughput), best.simulated)} {rival.name}, {what}")
    if best.bound_fraction is not None:
        parts.append(f"at {number(best.bound_fraction * 100)} % of the roofline ({best.limited_by})")
    speed = f"{number(best.median or 0)} tok/s{within}{kind}"
    return f"{best.name} is {', and '.join(parts)}: {speed}." if parts else f"{best.name}: {speed}."


def _times(ratio: Ratio, exact: bool) -> str:
    """How many times, with the interval, or why there is none; what is simulated is exact."""
    times = f"{number(ratio.ratio)}{TIMES_SIGN}"
    if exact:
        return times
    if ratio.low is None or ratio.high is None:
        return f"{times} (too few launches for an interval)"
    unsure = "" if ratio.excludes_one else " (1 is possible: not told apart)"
    return f"{times} [{', '.join(columns_of([ratio.low, ratio.high]))}]{unsure}"
