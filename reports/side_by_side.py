"""Two runs beside each other on a page: what each answers, cell by cell with verdicts, and in what they differ."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.api import HarnessError, RunRecord
from reports import sections, vega
from reports.answer import answer_of
from reports.compare import compare_records
from reports.compare_formats import compare_table
from reports.environment import differing
from reports.machine import machine_words
from reports.records import Runs, read_runs
from reports.samples import THROUGHPUT, Sample, pairs_of, samples_of
from reports.summary import by_workload, summary_rows
from reports.tables import Cell, Column, Table, plain_table
from reports.text import MISSING, number, one_line
from reports.vega import Datum, Panel, layer

#: The sides' words where the folders have the same name.
_SIDES = ("first", "second")


def side_by_side(dirs: Sequence[Path]) -> dict[str, object]:
    """The values of the template side_by_side.html. Raises HarnessError unless `dirs` are two run directories."""
    if len(dirs) != 2:
        raise HarnessError(f"--side-by-side takes two run directories, not {len(dirs)}")
    runs = [read_runs([folder]) for folder in dirs]
    names = [one_line(folder.resolve().name) for folder in dirs]
    if names[0] == names[1]:
        names = [f"{name} ({side})" for name, side in zip(names, _SIDES, strict=True)]
    compared = replace(compare_records(runs[0], runs[1]), base=names[0], head=names[1])
    table = compare_table(compared)
    columns = tuple(replace(c, title={"Base": names[0], "Head": names[1]}.get(c.title, c.title)) for c in table.columns)
    return {
        "title": f"{names[0]} and {names[1]}",
        "lead": compared.summary,
        "sides": _sides(runs, names),
        "differences": differing(runs[0].records, runs[1].records),
        "answers": _answers(runs, names),
        "cells": replace(table, caption=f"{names[1]} against {names[0]}", columns=columns),
        "panels": [panel] if (panel := _panel(runs, names)) else [],
        "notes": compared.notes,
    }


def _sides(runs: Sequence[Runs], names: Sequence[str]) -> Table:
    """What each side ran, on what and when; items that differ have a badge."""
    items = {
        "Machine": [machine_words(run.records) for run in runs],
        "Started": [sections.period(run.records) for run in runs],
        "Commit": [sections.commit(run.records) for run in runs],
        "Launches": [_launches(run.records) for run in runs],
    }
    lines = [
        [Cell(item, badges=("differs",) * (left != right)), *map(_or_missing, (left, right))]
        for item, (left, right) in items.items()
    ]
    columns = [Column("Item", numeric=False), *(Column(name, numeric=False, wide=True) for name in names)]
    return plain_table("What ran", columns, lines)


def _or_missing(text: str) -> Cell:
    return Cell(text) if text else Cell(MISSING, why="not recorded")


def _launches(records: Sequence[RunRecord]) -> str:
    ok = sum(r.status == "ok" for r in records)
    return f"{ok} ok of {len(records)}"


def _answers(runs: Sequence[Runs], names: Sequence[str]) -> Table:
    """The answer of each side to each workload."""
    sides = [{title: answer_of(rows).claim for title, rows in by_workload(summary_rows(run.records)).items()}
             for run in runs]  # fmt: skip
    lines = [
        [Cell(title), *(Cell(side.get(title, MISSING), why="" if title in side else "not run") for side in sides)]
        for title in {**sides[0], **sides[1]}
    ]
    columns = [Column("Workload", numeric=False, wide=True), *(Column(n, numeric=False, wide=True) for n in names)]
    return plain_table("Answers", columns, lines)


def _panel(runs: Sequence[Runs], names: Sequence[str]) -> Panel | None:
    """The launches of each side by cell, and their medians joined by a line; None where no cell has a throughput."""
    pairs = pairs_of(*(samples_of(run.launches, THROUGHPUT) for run in runs))
    shown = [pair for pair in pairs if any(side and side.speeds for side in pair)][: vega.MOST_CELLS]
    if not shown:
        return None
    data: list[Datum] = []
    for i, pair in enumerate(shown):
        data += [point for side, name in zip(pair, names, strict=True) if side for point in _points(i, side, name)]
    sides = dict(zip(names, (vega.ORANGE, vega.BLUE), strict=True))
    x = vega.quantity("generated tok/s", zero=True)
    spec = vega.row_chart(
        data,
        encoding={"color": vega.category("side", sides)},
        layer=[
            layer({"type": "line", "color": vega.SOFT, "strokeWidth": 1.5}, "datum.kind === 'median'",
                  x=x, detail={"field": "cell"}, color=None, tooltip=None, description=None),
            layer({"type": "point", "size": 30, "filled": True, "opacity": 0.5}, "datum.kind === 'launch'", x=x),
            layer({"type": "tick", "thickness": 3, "size": 18}, "datum.kind === 'median'", x=x),
        ],
    )  # fmt: skip
    note = f"Dots are launches, ticks their medians.{vega.truncation_note(pairs)}"
    return Panel("Throughput of both", note, spec, None)


def _points(index: int, side: Sample, name: str) -> list[Datum]:
    label = one_line(side.spec.name) or one_line(side.spec.engine)
    known: Datum = {"cell": f"{index + 1}. {label}", "side": name}
    points = [
        known | {"kind": "launch", "value": v, "tooltip": f"{label}, {name}: {number(v)} tok/s"} for v in side.speeds
    ]
    if (middle := side.level) is not None:
        words = f"{label}, {name}: median {number(middle)} tok/s of {len(side.speeds)} launches"
        points.append(known | {"kind": "median", "value": middle, "tooltip": words})
    return points
