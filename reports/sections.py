"""The sections of a report besides cell figures: failures, batch search, machine, provenance, definitions."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from harness.api import RunRecord
from reports.records import command_of
from reports.render import TEMPLATES
from reports.summary import CellSummary
from reports.tables import Body, Cell, Column, Table, name_cell, plain_table
from reports.text import GIB, MISSING, columns_of, finite, flat, grouped, listed, median, number, one_line, plural


def definitions() -> list[tuple[str, str]]:
    """What the report's figures mean: each term and its definition."""
    return list(yaml.safe_load((TEMPLATES / "definitions.yaml").read_text(encoding="utf-8")).items())


def failures(rows: Sequence[CellSummary]) -> Table | None:
    """Each cell's statuses other than ok, with their reasons; None without any."""
    lines = []
    for row in rows:
        failed = (record for record in row.records if record.status != "ok")
        for (status, reason), records in grouped(failed, lambda r: (r.status, one_line(r.reason))).items():
            expected = status == row.spec.expect
            log = records[-1].log
            lines.append([
                name_cell(row),
                Cell(status, badges=("expected",) * expected, tone="muted" if expected else "bad"),
                Cell(f"{len(records)} of {len(row.statuses)}"),
                Cell(reason or MISSING, why="" if reason else "no reason recorded"),
                Cell(log or MISSING, why="" if log else "no log kept"),
            ])  # fmt: skip
    titles = ("Cell", "Status", "Repeats", "Reason", "Log")
    columns = [Column(t, numeric=t == "Repeats", wide=t in {"Reason", "Log"}) for t in titles]
    return plain_table("Cells that did not end ok", columns, lines) if lines else None


def trials(rows: Sequence[CellSummary]) -> Table | None:
    """What each search tried, by batch and settings, with the measured launches of what it chose; None if no cell
    searched."""
    bodies = []
    for row in rows:
        record = next((r for r in reversed(row.records) if r.tuning), None)
        if record is None:
            continue
        batch = record.load.policy.gpu_batch_size if record.load else None
        chosen = (batch, tuple(record.settings.items()))
        tried = grouped(record.tuning, lambda t: (t.gpu_batch_size, tuple(t.settings.items())))
        measured = [
            r for r in row.records if r.load and (r.load.policy.gpu_batch_size, tuple(r.settings.items())) == chosen
        ]
        lines, speeds = [], []
        for key, launches in tried.items():
            repeats = measured if key == chosen else []
            failed = [t for t in launches if t.status != "ok"]
            survived = len(launches) - len(failed) + sum(r.status == "ok" for r in repeats)
            speeds.append(median([
                *(finite(t.throughput_tok_s) for t in launches),
                *(finite(r.metrics.get("generation_throughput_tok_s")) for r in repeats),
            ]))  # fmt: skip
            lines.append((
                Cell(str(key[0]), badges=("chosen",) * (key == chosen)),
                Cell(one_line(", ".join(f"{path.partition('.')[2]} {value}" for path, value in key[1])) or "its own"),
                Cell(f"{survived} of {len(launches) + len(repeats)}", tone="muted" if failed else "good"),
                Cell("; ".join(dict.fromkeys(f"{t.status}: {one_line(t.reason)}" for t in failed))),
            ))  # fmt: skip
        cells = [Cell(s, why="" if s != MISSING else "no launch survived") for s in columns_of(speeds)]
        bodies.append(Body(tuple((*line[:3], c, line[3]) for line, c in zip(lines, cells, strict=True)), row.name))
    columns = (
        Column("Batch", numeric=False),
        Column("Settings", numeric=False),
        Column("Survived", numeric=False),
        Column("Throughput", "tok/s"),
        Column("Failures", numeric=False, wide=True),
    )
    return (
        Table("What was tried, in the order of the search; median throughput", columns, tuple(bodies))
        if bodies
        else None
    )


def machine_rates(records: Iterable[RunRecord]) -> Table | None:
    """Disk, copy and GEMM rates of all machine probes of the run; None without a probe."""
    by_time = sorted(records, key=lambda r: r.started_at)
    probes = {r.machine.measured_at or str(i): r.machine for i, r in enumerate(by_time) if r.machine}
    measured: dict[tuple[str, str], list[list[float]]] = {}  # by (rate, unit): the finite samples of each probe
    shapes = set()
    for probe in probes.values():
        kinds = [("Disk read", "GB/s", probe.disk_read), ("Copies to the device", "GB/s", probe.h2d)]
        place = "on the device " if probe.h2d else ""
        for dtype, by_rows in probe.gemm_flops.items():
            for count, samples in by_rows.items():
                kinds.append((f"GEMM {place}{dtype}, {count} {'row' if count == '1' else 'rows'}", "GFLOP/s", samples))
        for name, unit, samples in kinds:
            if finite_samples := [v / 1e9 for v in samples if finite(v) is not None]:
                measured.setdefault((name, unit), []).append(finite_samples)
        if probe.gemm_shape and probe.gemm_flops:
            shapes.add("x".join(map(str, probe.gemm_shape)))
    lines = []
    for (name, unit), probed in sorted(measured.items(), key=lambda rate: _natural(rate[0][0])):
        rates = [v for samples in probed for v in samples]
        medians = [statistics.median(samples) for samples in probed]
        low, mid, high = columns_of([min(rates), statistics.median(medians), max(rates)])
        lines.append((*map(Cell, (name, unit, mid, low, high, str(len(medians)))), spark_cell(medians)))
    if not lines:
        return None
    titles = ("Rate", "Unit", "Median", "Lowest", "Highest", "Probes", "Over the run")
    columns = [Column(t, numeric=t not in {"Rate", "Unit", "Over the run"}) for t in titles]
    matrices = f" GEMM is x[rows, k] times W[k, n] with k x n = {', '.join(sorted(shapes))}." if shapes else ""
    return plain_table(f"Rates measured around the launches.{matrices}", columns, lines)


def setup(rows: Sequence[CellSummary]) -> Table | None:
    """Each cell's environment, its engine's packages, and the engine's notes at load; None without any."""
    lines = []
    for row in rows:
        record = next((r for r in row.records if r.load), None)
        if record is None or record.load is None or record.simulated:
            continue
        known = record.provenance
        packages = known.get("packages")
        versions = ", ".join(f"{n} {v}" for n, v in packages.items()) if isinstance(packages, dict) else ""
        image = f"{known['image']} {str(known.get('image_digest', ''))[:19]}" if "image" in known else ""
        environment = image or str(known.get("environment", "")) or record.spec.launcher
        notes = one_line("; ".join(record.load.notes)) or MISSING
        lines.append((Cell(row.name), Cell(environment), Cell(one_line(versions) or MISSING), Cell(notes)))
    columns = [Column(title, numeric=False, wide=True) for title in ("Cell", "Runs in", "Packages", "As loaded")]
    return plain_table("Set-up of each cell", columns, lines) if lines else None


def provenance(records: Sequence[RunRecord]) -> Table | None:
    """Machine, versions, commit and task data of the records; lists values that differ with their counts."""
    values: dict[str, Counter[str]] = {}
    for record in records:
        data = {f"sha256.{name}": digest for name, digest in record.accuracy.files.items()} if record.accuracy else {}
        for key, value in (_flat_text(record.provenance) | data).items():
            values.setdefault(key, Counter())[value] += 1
    lines = [(Cell(key), _value_cell(counts)) for key, counts in values.items()]
    columns = (Column("Item", numeric=False), Column("Value", numeric=False, wide=True))
    return plain_table("Machine, versions and commit", columns, lines) if lines else None


def commit(records: Sequence[RunRecord]) -> str:
    """The commit of the records, shortened; empty where they record none or several."""
    states = [_flat_text(r.provenance) for r in records]
    commits = {state.get("git.commit", "") for state in states}
    if len(commits) != 1:
        return ""
    changed = any(state.get("git.dirty") == "True" for state in states)
    return commits.pop()[:12] + (", with local changes" if changed else "")


def commands(rows: Sequence[CellSummary]) -> list[tuple[str, str]]:
    """(cell names, command) for each recorded command of a last repeat."""
    by_command = grouped(rows, lambda row: command_of(row.records[-1]))
    return [(", ".join(row.name for row in cells), command) for command, cells in by_command.items() if command]


def period(records: Sequence[RunRecord]) -> str:
    """The recorded start times of the first and the last record."""
    times = sorted(r.started_at for r in records if r.started_at)
    ends = [t.replace("T", " ").replace("+00:00", " UTC") for t in (*times[:1], *times[1:][-1:])]
    return " to ".join(ends)


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key that orders numbers by value: 8 rows before 64 rows."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in name.split()]


def spark_cell(medians: Sequence[float]) -> Cell:
    """A sparkline with zero at the bottom and the largest value near the top."""
    top = max(medians) or 1
    width = max(len(medians) - 1, 1)
    points = tuple((4 + 92 * i / width, 90 - 75 * v / top) for i, v in enumerate(medians))
    return Cell("", why=f"one point a probe: {', '.join(number(v) for v in medians[:50])}", spark=points)


def _flat_text(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Nested data as `a.b: text`, with lists joined and without empty values."""
    out = {}
    for key, value in flat(provenance).items():
        if isinstance(value, list | tuple):
            out[key] = listed(value)
        elif key.endswith("_bytes") and (size := finite(value)) is not None:
            out[key.removesuffix("_bytes")] = f"{number(size / GIB)} GiB"
        else:
            out[key] = "" if value is None else str(value)
    return {key: text for key, text in out.items() if text}


def _value_cell(counts: Mapping[str, int]) -> Cell:
    if len(counts) == 1:
        return Cell(next(iter(counts)))
    values = [f"{value} ({plural(count, 'record')})" for value, count in list(counts.items())[:4]]
    more = [f"and {len(counts) - 4} more"] if len(counts) > 4 else []
    return Cell("; ".join(values + more), badges=("differs",))
