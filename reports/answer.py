"""The answer of a workload: which cell is fastest or how accurate cells are, how sure that is, and what limits it."""

from collections.abc import Sequence
from dataclasses import dataclass

from reports.accuracy import detectable_of
from reports.judged import Judged, judged
from reports.stats import PAIRED_LEVEL, Ratio
from reports.summary import CellSummary, ranked, rival_of
from reports.text import TIMES_SIGN, grouped, number, plural, span

#: What the facts of an answer are called.
THROUGHPUT, SURE, LIMITED = "Throughput", "How sure", "Limited by"
EXACT, CLOSEST, FASTEST = "Exact answers", "Closest to them", "Fastest"

#: The facts that tell answers of many workloads apart.
OVERVIEW = (THROUGHPUT, EXACT, SURE, LIMITED)
#: The most cells that a claim names.
_MOST_NAMES = 3


@dataclass(frozen=True)
class Answer:
    """A claim, and the facts that carry it by name."""

    claim: str
    facts: dict[str, str]


def answer_of(rows: Sequence[CellSummary]) -> Answer:
    """The answer of a workload: of a task about its accuracy, else about its speed."""
    figures = judged(rows)
    return _accuracy(figures, rows) if figures else _speed(rows)


def headline(rows: Sequence[CellSummary]) -> str:
    """One sentence on speed: the fastest cell, its ratio to its rival, its share of the roofline, its throughput."""
    order = ranked(rows)
    if not order:
        return _no_result(rows)
    best, parts = order[0], []
    if rival := rival_of(best, order):
        parts.append(f"{_times_with_interval(best)} {rival.name}, {_role(best, rival)}")
    if best.job_fraction is not None:
        parts.append(_share(best))
    speed = _throughput(best)
    return f"{best.name} is {', and '.join(parts)}: {speed}." if parts else f"{best.name}: {speed}."


def _speed(rows: Sequence[CellSummary]) -> Answer:
    order = ranked(rows)
    if not order:
        return Answer(_no_result(rows), {})
    best = order[0]
    rival = rival_of(best, order)
    claim, facts = best.name, {THROUGHPUT: _throughput(best)}
    if rival and best.ratio:
        claim = f"{best.name} is {_times(best.ratio)} as fast as {rival.name}, {_role(best, rival)}"
        facts[SURE] = _sure(best.ratio, best, rival)
    if best.limited_by:
        share = "" if best.job_fraction is None else f", {_share(best)}"
        facts[LIMITED] = f"{best.limited_by}{share}"
    return Answer(f"{claim}.", facts)


def _accuracy(figures: Sequence[Judged], rows: Sequence[CellSummary]) -> Answer:
    """What inexact cells lose, if exact ones answered the same examples; else what the cells reach."""
    first = [f for f in figures if f.name == figures[0].name]
    exact = [f for f in first if f.exact] or first
    facts = {EXACT: _value(exact[0])}
    compared = [f for f in first if not f.exact and f.compared]
    if compared:
        claim = _losses(compared)
        closest = min(compared, key=lambda f: abs(f.compared.difference) if f.compared else 0.0)
        change, interval = closest.change or ("", "")
        facts[CLOSEST] = f"{closest.row.name}: {change} [{interval}]"
        facts[SURE] = _pairs(closest)
    else:
        low, high = (end(f.value for f in first) for end in (min, max))
        reach = f"{first[0].name} {number(low) if number(low) == number(high) else span(low, high)}"
        claim = f"{reach} in {plural(len(first), 'cell')}." if len(first) > 1 else f"{first[0].row.name}: {reach}."
    if best := next(iter(ranked(rows)), None):
        rival = rival_of(best, ranked(rows))
        ratio = f", {_times_with_interval(best)} {rival.name}" if rival else ""
        facts[FASTEST] = f"{best.name}: {_throughput(best)}{ratio}"
    return Answer(claim, facts)


def _losses(compared: Sequence[Judged]) -> str:
    """How many cells are significantly less accurate than exact arithmetic, and which are not."""
    by_loss = grouped(compared, lambda f: bool(f.compared and f.compared.significant and f.compared.difference < 0))
    lossy, kept, name = len(by_loss.get(True, ())), [f.row.name for f in by_loss.get(False, ())], compared[0].name
    if not kept:
        return f"{plural(lossy, 'cell')} of {lossy} significantly worse in {name} than exact arithmetic."
    named = ", ".join(kept) if len(kept) <= _MOST_NAMES else plural(len(kept), "cell")
    others = f"; {lossy} of {len(compared)} are worse" if lossy else ""
    return f"No significant difference in {name} from exact arithmetic: {named}{others}."


def _value(figure: Judged) -> str:
    error = "" if figure.error is None else f" (standard error {number(figure.error)})"
    return f"{figure.name} {number(figure.value)}{error}, {figure.accuracy.examples:,} examples"


def _pairs(figure: Judged) -> str:
    """How the comparison was made, and what it could have seen."""
    assert figure.compared is not None and figure.pairs is not None
    if figure.compared.significant:
        return f"significant at {PAIRED_LEVEL:.0%}, {len(figure.pairs[0]):,} pairs of answers"
    detected = detectable_of(figure, figure.compared)
    return f"{len(figure.pairs[0]):,} pairs of answers; {detected} would be seen with 80 % power"


def _no_result(rows: Sequence[CellSummary]) -> str:
    return "No cell has a result that can be ranked." if len(rows) > 1 else "The cell has no result."


def _role(best: CellSummary, rival: CellSummary) -> str:
    return "the next fastest cell" if rival.engine == best.engine else "the fastest of another engine"


def _share(best: CellSummary) -> str:
    return f"at {number(100 * (best.job_fraction or 0.0))} % of what this machine allows for the job"


def _throughput(best: CellSummary) -> str:
    within = " within the limit" if best.limit_bytes else ""
    kind = "" if best.kind == "measured" else f" ({best.kind})"
    return f"{number(best.median or 0)} tok/s{within}{kind}"


def _times(ratio: Ratio) -> str:
    return f"{number(ratio.ratio)}{TIMES_SIGN}"


def _times_with_interval(best: CellSummary) -> str:
    """The ratio with its interval, or why it has none; a simulated ratio is exact and needs none."""
    assert best.ratio is not None  # a cell with a rival has a ratio
    times, low, high = _times(best.ratio), best.ratio.low, best.ratio.high
    if best.kind == "simulated":
        return times
    if low is None or high is None:
        return f"{times} (too few launches for an interval)"
    caveat = "" if best.ratio.excludes_one else " (not significant: the interval includes 1)"
    return f"{times} [{span(low, high, ', ')}]{caveat}"


def _sure(ratio: Ratio, best: CellSummary, rival: CellSummary) -> str:
    if best.kind == "simulated":
        return "simulated, without noise"
    launches = f"{len(best.throughput)} and {plural(len(rival.throughput), 'launch', 'launches')}"
    if ratio.low is None or ratio.high is None:
        return f"not known: {launches}, an interval needs three of each"
    interval = f"{span(ratio.low, ratio.high)} {TIMES_SIGN} (95 %), {launches}"
    return interval if ratio.excludes_one else f"not settled: {interval}"
