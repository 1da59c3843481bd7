"""Assembles the content of a report from records, before any markup."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness.api import RunRecord
from reports import figures, sections
from reports.ablation import ablation_panel
from reports.accuracy import accuracy_panel, accuracy_remarks, accuracy_table
from reports.answer import OVERVIEW, Answer, answer_of
from reports.charts import bound_panel, memory_panel, predicted_panel, tasks_panel, throughput_panel, tiers_panel
from reports.environment import machines
from reports.latency import pareto_panel, spread_panels
from reports.links import links_section
from reports.machine import machine_words
from reports.power import power_table
from reports.published import published_table
from reports.ranks import ranks_tables
from reports.records import Runs
from reports.serving import serving_panels
from reports.summary import CellSummary, by_workload, disturbance, summary_rows, throughput
from reports.tables import MOST_ROWS, Cell, Column, Table, cell_table, plain_table
from reports.text import MISSING, columns_of, grouped, median, number, one_line, plural
from reports.timeline import utilisation_panel
from reports.vega import Panel
from reports.verdicts import MULTIPLE


def page(runs: Runs, trends: Sequence[Panel] = ()) -> dict[str, object]:
    """The values of the templates report.html and report.md: the report on `runs`, with the trends of their cells."""
    groups = _groups(runs)
    rows = [row for group in groups.values() for row in group]
    answers = {title: answer_of(group) for title, group in groups.items()}
    suites = list(dict.fromkeys(filter(None, (one_line(row.spec.suite) for row in rows))))
    facts = {
        **_machines(runs),
        "Started": sections.period(runs.records),
        "Commit": sections.commit(runs.records),
    }
    return {
        "title": _title(suites),
        "descriptions": runs.descriptions,
        "outcome": _outcome(rows),
        "facts": [(k, v) for k, v in facts.items() if v],
        "notes": [*runs.notes, *_mixed(runs)],
        "answers": _answers(answers) if len(groups) > 1 else None,
        "workloads": [
            {"title": title, "answer": answers[title]} | _workload(group, runs, f"cell-{i}")
            for i, (title, group) in enumerate(groups.items(), 1)
        ],
        "ranks": ranks_tables(runs),
        "links": links_section(runs),
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


def _answers(answers: Mapping[str, Answer]) -> Table:
    """The answer of each workload, with a link to it."""
    names = [name for name in OVERVIEW if any(name in answer.facts for answer in answers.values())]
    columns = [Column("Workload", numeric=False, wide=True), Column("Answer", numeric=False, wide=True)]
    columns += [Column(name, numeric=False) for name in names]
    lines = [
        [Cell(title, href=f"workload-{i}"), Cell(answer.claim),
         *(Cell(answer.facts.get(name, MISSING), why="" if name in answer.facts else "no figure") for name in names)]
        for i, (title, answer) in enumerate(answers.items(), 1)
    ]  # fmt: skip
    return plain_table("Answers", columns, lines)


def _groups(runs: Runs) -> dict[str, list[CellSummary]]:
    """The comparable cells by a title: those of a workload, and of a machine where the runs are of several."""
    if len(runs.by_machine) == 1:
        return by_workload(summary_rows(runs.records))
    groups: dict[str, list[CellSummary]] = {}
    for i, records in enumerate(runs.by_machine, 1):
        groups |= {f"{title}, machine {i}": rows for title, rows in by_workload(summary_rows(records)).items()}
    return groups


def _machines(runs: Runs) -> dict[str, str]:
    """What each machine is."""
    words = list(map(machine_words, runs.by_machine))
    return {"Machine" if len(words) == 1 else f"Machine {i}": text for i, text in enumerate(words, 1)}


def _workload(rows: Sequence[CellSummary], runs: Runs, anchor: str) -> dict[str, object]:
    """The report on the cells of a workload, which are comparable; `anchor` begins the names of their permalinks."""
    finished = [r for r in rows if r.throughput]
    serving = serving_panels(finished)
    panels = (
        accuracy_panel(finished), throughput_panel(rows), pareto_panel(finished), ablation_panel(rows),
        tasks_panel(finished), utilisation_panel(rows), bound_panel(finished), memory_panel(rows),
        tiers_panel(finished), predicted_panel(finished), *spread_panels(finished), *serving,
    )  # fmt: skip
    accuracy = accuracy_table(rows)
    padding = [cell_table("Speed of the answers", finished, figures.PADDING)] if accuracy else []
    power = power_table(finished)
    times = [cell_table("Latency and phases, median over repeats", finished, figures.TIMES)] if finished else []
    return {
        "remarks": _remarks(rows),
        "summary": cell_table("Summary, fastest first", rows, figures.SUMMARY, anchor),
        "summary_short": cell_table("Summary, fastest first", rows[:MOST_ROWS], figures.SUMMARY_SHORT),
        "accuracy": accuracy.first() if accuracy else None,
        "served": [replace(p.table, caption=p.title).first() for p in serving[:2] if p.table],
        "published": published_table(rows, runs.reproduces),
        "panels": [replace(p, table=p.table.first() if p.table else None) for p in panels if p],
        "power": power,
        "details": [table.first() for table in [*padding, *times, *([power] if power else [])]],
    }


def _mixed(runs: Runs) -> list[str]:
    """A note where a run directory has records of several machines, whose figures are not comparable."""
    count = machines(runs.records)
    advice = "figures of different machines are not comparable"
    if count <= len(runs.by_machine):  # each has sections of its own
        return []
    return [f"These records come from {count} machines: {advice}; Provenance lists the differences."]


def _log_tail(row: CellSummary, runs: Runs) -> str:
    """The end of the log of the last repeat that failed unexpectedly."""
    failed = (r for r in reversed(row.records) if r.status not in ("ok", row.spec.expect))
    return next((tail for r in failed if (tail := runs.log_tail(r))), "")


def _remarks(rows: Sequence[CellSummary]) -> list[str]:
    """Caveats of the ranking."""
    references = [f"{r.name} {number(r.median)}" for r in rows if r.reference and r.median is not None]
    remarks = [f"References without the limit: {', '.join(references)} tok/s."] if references else []
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
    remarks += [f"{r.name}: {note}." for r in rows for note in dict.fromkeys(n for x in r.ok_records for n in x.notes)]
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
