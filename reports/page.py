"""Assembles the content of a report from records, before any markup."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from harness.api import RunRecord
from reports import figures, sections
from reports.ablation import ablation_panel
from reports.accuracy import accuracy_panel, accuracy_remarks, accuracy_table
from reports.charts import bound_panel, memory_panel, predicted_panel, tasks_panel, throughput_panel, tiers_panel
from reports.environment import machines
from reports.latency import pareto_panel, spread_panels
from reports.published import published_table
from reports.records import Runs
from reports.summary import CellSummary, by_workload, disturbance, headline, summary_rows, throughput
from reports.tables import MOST_ROWS, cell_table
from reports.text import columns_of, grouped, median, number, one_line, plural
from reports.timeline import utilisation_panel
from reports.vega import Panel
from reports.verdicts import MULTIPLE


def page(runs: Runs, trends: Sequence[Panel] = ()) -> dict[str, object]:
    """The values of the templates report.html and report.md: the report on `runs`, with the trends of their cells."""
    rows = summary_rows(runs.records)
    suites = list(dict.fromkeys(filter(None, (one_line(row.spec.suite) for row in rows))))
    facts = {"Started": sections.period(runs.records), "Commit": sections.commit(runs.records)}
    return {
        "title": _title(suites),
        "descriptions": runs.descriptions,
        "outcome": _outcome(rows),
        "facts": [(k, v) for k, v in facts.items() if v],
        "notes": [*runs.notes, *_mixed(runs)],
        "workloads": [_workload(title, group, runs) for title, group in by_workload(rows).items()],
        "trends": trends,
        "failures": sections.failures(rows),
        "logs": [(row.name, tail) for row in rows if (tail := _log_tail(row, runs))],
        "trials": sections.trials(rows),
        "rates": sections.machine_rates(runs.records),
        "setup": sections.setup(rows),
        "provenance": sections.provenance(runs.records),
        "commands": sections.commands(rows),
        "definitions": sections.definitions(),
    }


def _title(suites: Sequence[str]) -> str:
    more = f" and {len(suites) - 4} more" if len(suites) > 4 else ""
    return (", ".join(suites[:4]) + more) or "Benchmark report"


def _workload(title: str, rows: Sequence[CellSummary], runs: Runs) -> dict[str, object]:
    """The report on the cells of a workload, which are comparable."""
    finished = [r for r in rows if r.throughput]
    panels = (
        throughput_panel(rows), pareto_panel(finished), ablation_panel(rows), tasks_panel(finished),
        utilisation_panel(rows), bound_panel(finished), memory_panel(rows), tiers_panel(finished),
        predicted_panel(finished), accuracy_panel(finished), *spread_panels(finished),
    )  # fmt: skip
    accuracy = accuracy_table(rows)
    answers = [accuracy, cell_table("Speed of the answers", finished, figures.PADDING)] if accuracy else []
    times = [cell_table("Latency, phases and energy, median over repeats", finished, figures.TIMES)] if finished else []
    return {
        "title": title,
        "headline": headline(rows),
        "remarks": _remarks(rows),
        "summary": cell_table("Summary, fastest first", rows, figures.SUMMARY),
        "summary_short": cell_table("Summary, fastest first", rows[:MOST_ROWS], figures.SUMMARY_SHORT),
        "accuracy": [table.first() for table in answers],
        "published": published_table(rows, runs.reproduces),
        "panels": [replace(p, table=p.table.first() if p.table else None) for p in panels if p],
        "details": [table.first() for table in times],
    }


def _mixed(runs: Runs) -> list[str]:
    """A note where the records come from several machines, whose figures are not comparable."""
    count = machines(runs.records)
    advice = "figures of different machines are not comparable"
    return [f"These records come from {count} machines: {advice}; Provenance lists the differences."] * (count > 1)


def _log_tail(row: CellSummary, runs: Runs) -> str:
    """The end of the log of the last repeat that failed unexpectedly."""
    failed = (r for r in reversed(row.records) if r.status not in ("ok", row.spec.expect))
    return next((tail for r in failed if (tail := runs.log_tail(r))), "")


def _remarks(rows: Sequence[CellSummary]) -> list[str]:
    """Caveats of the ranking."""
    remarks = [
        f"Reference without the limit: {r.name}, {number(r.median)} tok/s."
        for r in rows
        if r.reference and r.median is not None
    ]
    competitors = [r for r in rows if not r.reference and r.median is not None]
    if len({r.spec.limits for r in competitors}) > 1:
        remarks.append("The limits differ between these cells: compare the memory columns too.")
    if any(r.fewer_requests for r in competitors):
        remarks.append("Not all cells completed the same number of requests; cells with fewer are marked.")
    if any(r.kind != "measured" for r in rows):
        remarks.append("Simulated cells are not measurements and never rank above measured cells.")
    errors = sorted(abs(r.prediction_error) for r in rows if r.kind != "simulated" and r.prediction_error is not None)
    if errors:
        middle = number(100 * (median(errors) or 0.0))
        remarks.append(f"The performance model's median error over {plural(len(errors), 'cell')} is {middle} %, its "
                       f"largest {number(100 * errors[-1])} %; harness plan --explain breaks them down.")  # fmt: skip
    remarks += [
        _disturbed(r, launches)
        for r in rows
        if (launches := [x for x in r.records if x.status == "ok" and x.disturbed])
    ]
    remarks += [
        f"{r.name}: launches differ by a factor of {number(factor)} without a known cause."
        for r in rows
        if r.throughput and (factor := max(r.throughput) / min(r.throughput)) >= MULTIPLE
    ]
    remarks += accuracy_remarks(rows)
    if any(len(r.throughput) < 3 and r.kind != "simulated" for r in competitors):
        remarks.append("Some cells have fewer than three finished repeats, too few to judge small differences.")
    return remarks


def _disturbed(row: CellSummary, launches: Sequence[RunRecord]) -> str:
    """Which launches of a cell were disturbed, how much, and whether its figures leave them out."""
    if row.ok_records[0].disturbed:
        return f"{row.name}: all launches were disturbed ({disturbance(launches)}): measure it again."
    speeds = ", ".join(columns_of([throughput(r) for r in launches]))
    return (f"{row.name}: {len(launches)} of {plural(len(row.records), 'launch', 'launches')} left out of its figures "
            f"because {disturbance(launches)}: {speeds} tok/s.")  # fmt: skip


def _outcome(rows: Sequence[CellSummary]) -> str:
    """One sentence: how many cells ended with which status."""
    surprises = [r for r in rows if not r.as_expected]
    # for a simulated machine, that a cell does not fit is a result and not a failure
    is_answer = grouped(surprises, lambda r: r.kind == "simulated" and r.status in ("infeasible", "skipped"))
    answers, unexpected = is_answer.get(True, []), is_answer.get(False, [])
    expected = sum(r.expected_failure for r in rows)
    ok = sum(r.status == "ok" and r.as_expected for r in rows)
    parts = [f"{ok} ok", *(f"{n} {status}" for status, n in Counter(r.status for r in answers).items())]
    parts += [f"{expected} failed as expected"] if expected else []
    names = one_line(", ".join(r.name for r in unexpected[:12])) + (" and others" if len(unexpected) > 12 else "")
    parts += [f"{len(unexpected)} not as expected ({names})"] * bool(unexpected)
    repeats = sum(len(r.records) for r in rows)
    return f"{plural(len(rows), 'cell')}, {plural(repeats, 'repeat')}: {', '.join(parts)}."
