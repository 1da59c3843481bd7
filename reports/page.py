"""Puts a report together from records: what is shown and in which order, before any markup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from reports import sections, tables
from reports.accuracy import accuracy_remarks, accuracy_table
from reports.charts import Chart, bound_chart, memory_chart, throughput_chart
from reports.records import Runs
from reports.summary import DISTURBED, CellSummary, by_workload, headline, metric, others_share, summary_rows
from reports.tables import Table, cell_table
from reports.text import median, number, one_line, plural
from reports.timeline import Timeline, timelines


@dataclass(frozen=True)
class WorkloadPart:
    """What is said about the cells that may be compared with each other."""

    title: str
    headline: str
    remarks: tuple[str, ...]
    summary: Table
    summary_short: Table
    accuracy: tuple[Table, ...]
    charts: tuple[Chart, ...]
    timelines: tuple[Timeline, ...]
    details: tuple[Table, ...]


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    descriptions: tuple[str, ...]
    outcome: str
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    workloads: tuple[WorkloadPart, ...]
    failures: Table | None
    trials: Table | None
    rates: Table | None
    setup: Table | None
    provenance: Table | None
    commands: tuple[tuple[str, str], ...]
    definitions: tuple[tuple[str, str], ...]


def page(runs: Runs) -> Page:
    """The report on `runs`."""
    rows = summary_rows(runs.records)
    suites = list(dict.fromkeys(row.suite for row in rows if row.suite))
    facts = {"Started": sections.period(runs.records), "Commit": sections.commit(runs.records)}
    return Page(
        title=", ".join(suites) or "Benchmark report",
        descriptions=runs.descriptions,
        outcome=_outcome(rows),
        facts=tuple((k, v) for k, v in facts.items() if v),
        notes=runs.notes,
        workloads=tuple(_workload(title, group) for title, group in by_workload(rows).items()),
        failures=sections.failures(rows),
        trials=sections.trials(rows),
        rates=sections.machine_rates(runs.records),
        setup=sections.setup(rows),
        provenance=sections.provenance(runs.records),
        commands=tuple(sections.commands(rows)),
        definitions=sections.DEFINITIONS,
    )


def _workload(title: str, rows: Sequence[CellSummary]) -> WorkloadPart:
    finished = [r for r in rows if r.throughput]
    bounded = [r for r in finished if r.bound_tok_s is not None]
    counted = [r for r in rows if r.peak_bytes is not None]
    forecast = [r for r in finished if r.predicted_tok_s is not None and not r.simulated]
    tasked = [r for r in finished if metric(r.ok_records, "task_products_s") is not None]
    placed = [r for r in finished if any(x.load and x.load.policy and x.load.policy.weights for x in r.ok_records)]
    charts = (throughput_chart(rows), memory_chart(rows), bound_chart(rows))
    details = [
        ("Memory over all repeats, the largest seen", counted, tables.MEMORY),
        ("What the machine allows", bounded, tables.BOUND),
        ("Prediction beside measurement", forecast, tables.PREDICTED),
        ("Latency, phases and energy, median over repeats", finished, tables.TIMES),
        ("Seconds in which each task was at work; what overlaps counts in both", tasked, tables.TASKS),
        ("What was placed where", placed, tables.PLACEMENT),
    ]
    return WorkloadPart(
        title=title,
        headline=headline(rows),
        remarks=tuple(_remarks(rows)),
        summary=cell_table("Summary, fastest first", rows, tables.SUMMARY, status=True),
        summary_short=cell_table("Summary, fastest first", rows, tables.SUMMARY_SHORT, status=True),
        accuracy=_accuracy(rows, finished),
        charts=tuple(c for c in charts if c),
        timelines=timelines(rows),
        details=tuple(cell_table(caption, some, figures) for caption, some, figures in details if some),
    )


def _accuracy(rows: Sequence[CellSummary], finished: Sequence[CellSummary]) -> tuple[Table, ...]:
    """Of a task: what answers are worth, and how fast they came, with and without padding."""
    judged = accuracy_table(rows)
    return () if judged is None else (judged, cell_table("How fast the answers came", finished, tables.PADDING))


def _remarks(rows: Sequence[CellSummary]) -> list[str]:
    """What a reader must know before trusting the ranking."""
    remarks = [
        f"Reference without the limit: {r.name}, {number(r.median)} tok/s."
        for r in rows
        if r.reference and r.median is not None
    ]
    own = [r for r in rows if not r.reference and r.median is not None]
    if len({r.records[-1].spec.limits for r in own}) > 1:
        remarks.append("The limits differ between these cells; compare them with the memory columns in view.")
    if any(r.fewer_requests for r in own):
        remarks.append("Not all cells answered the same number of requests; those with fewer are marked.")
    if any(r.simulated or r.projected for r in rows):
        remarks.append("Simulated and projected cells were not measured and are never ranked above measured ones.")
    if errors := sorted(abs(r.prediction_error) for r in rows if r.prediction_error is not None):
        middle = number(100 * (median(errors) or 0.0))
        remarks.append(f"The performance model is off by {middle} % in the median of {plural(len(errors), 'cell')}, by "
                       f"{number(100 * errors[-1])} % at most; `harness plan --explain` says where.")  # fmt: skip
    if disturbed := [r.name for r in rows if others_share(r.ok_records) > DISTURBED]:
        names = ", ".join(disturbed)
        remarks.append(f"Other processes took more than {DISTURBED:.0%} of the CPU while these ran: {names}.")
    remarks += accuracy_remarks(rows)
    if any(len(r.throughput) < 3 for r in own):
        remarks.append("Some cells have fewer than three finished repeats: too few to judge small differences.")
    return remarks


def _outcome(rows: Sequence[CellSummary]) -> str:
    """How many cells ended how."""
    # of a machine that is not here, what does not fit is an answer
    answers = [r for r in rows if r.simulated and not r.as_expected and r.status in ("infeasible", "skipped")]
    unexpected = [r for r in rows if not r.as_expected and r not in answers]
    expected = sum(r.expected_failure for r in rows)
    ok = sum(r.status == "ok" and r.as_expected for r in rows)
    parts = [f"{ok} ok", *(f"{n} {status}" for status, n in Counter(r.status for r in answers).items())]
    parts += [f"{expected} failed as expected"] if expected else []
    parts += [f"{len(unexpected)} not as expected ({one_line(', '.join(r.name for r in unexpected))})"] * bool(
        unexpected
    )
    repeats = sum(len(r.records) for r in rows)
    return f"{plural(len(rows), 'cell')}, {plural(repeats, 'repeat')}: {', '.join(parts)}."
