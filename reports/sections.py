"""The parts of a report beside the cells' figures: failures, batch search, machine, provenance, definitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.api import RunRecord
from reports.summary import CellSummary
from reports.tables import Body, Cell, Column, Table, name_cell, plain_table
from reports.text import GIB, MISSING, columns_of, finite, flat, median, number, one_line

DEFINITIONS: tuple[tuple[str, str], ...] = (
    (
        "Throughput",
        "generated tokens / (prefill time + decode time), in real, non-pad tokens; median over repeats. Of tasks that "
        "only score continuations: tokens scored with their contexts, over the time it took.",
    ),
    ("Repeat", "one launch of the engine in a fresh process or container; every repeat is kept and shown."),
    (
        "To best rival",
        "how many times the throughput of the fastest ranked cell of another engine with the same model and workload "
        "(where only one engine is ranked, of its fastest other cell): the Hodges-Lehmann ratio, which is the median "
        "of all quotients of a launch of one by a launch of the other. A cell is ranked if all its repeats are ok and "
        "it is no reference.",
    ),
    (
        "95 % interval",
        "percentile bootstrap over launches, 2,000 resamples. Of two or three launches it is no wider than their "
        "range, so smaller than it should be.",
    ),
    (
        "Roofline, of bound",
        "throughput over the most this machine allowed for the cell's batch and dtype: the slower of compute and "
        "disk at rates measured around the launch, perfectly overlapped, with all of the budget holding weights (with "
        "a device the slowest of its compute, the disk, and copies to it of weights that it cannot hold). The median "
        "over launches; one that ran in a faster minute than the rates' may be above its bound.",
    ),
    (
        "Predicted",
        "what the performance model says of the same job, from this host's rates, which were measured at another time "
        "and are brought to the minute of a launch by those measured around it; of the run itself it knows only the "
        "dtype in which it computed.",
    ),
    (
        "Disk hidden",
        "share of the time in which the disk was read that the arithmetic did not stand still for; from the engine's "
        "timeline, of which one full pass is drawn and kept as a Chrome trace.",
    ),
    ("Peak memory, limit", "highest memory of the engine's process tree, and where it was capped: idle + budget."),
    ("Read", "bytes read from storage while generating, over generated tokens (1 MB = 10^6 bytes)."),
    (
        "Same output",
        "outputs equal token for token to the reference cell's for the same model, workload, seed and request, "
        "over all repeats. Another dtype may round differently, so fewer is not always an error.",
    ),
    (
        "TTFT, TPOT",
        "time from when work on a request began, so without its waiting, to its first token; time per output token "
        "after it. Percentiles over requests.",
    ),
    ("p50, p99", "percentile within a repeat, then median over repeats; below 100 requests p99 is close to the worst."),
    ("Decode", "generated tokens / decode time; missing where prefill and decode overlap."),
    (
        "Total, padded",
        "(prompt + generated or scored tokens) / total time; padded counts pad positions as well. Real: the part of "
        "what was computed that was no padding. Wall: a launch from its start to its end, set-up included.",
    ),
    ("Energy", "joules counted while generating, over generated tokens; missing where there is no counter."),
    ("Reference", "a resident engine run without the limit: shown for scale, never ranked."),
    ("Simulated, projected", "not measured: virtual time on a hardware profile, or a short run scaled up."),
)


def failures(rows: Sequence[CellSummary]) -> Table | None:
    """Every way a cell did not end ok, with its reason; None if there is none."""
    lines = []
    for row in rows:
        groups: dict[tuple[str, str], list[RunRecord]] = {}
        for record in row.records:
            if record.status != "ok":
                groups.setdefault((record.status, one_line(record.reason)), []).append(record)
        for (status, reason), records in groups.items():
            expected = status == row.expect
            lines.append(
                (
                    name_cell(row),
                    Cell(status, badges=("expected",) * expected, tone="muted" if expected else "bad"),
                    Cell(f"{len(records)} of {len(row.statuses)}"),
                    Cell(reason or MISSING, why="" if reason else "no reason was recorded"),
                    Cell(records[-1].log or MISSING, why="" if records[-1].log else "no log was kept"),
                )
            )
    columns = [
        Column(t, numeric=t == "Repeats", wide=t in {"Reason", "Log"})
        for t in ("Cell", "Status", "Repeats", "Reason", "Log")
    ]
    return plain_table("Cells that did not end ok", columns, lines) if lines else None


def trials(rows: Sequence[CellSummary]) -> Table | None:
    """The steps of each batch search; None if no cell searched."""
    bodies = []
    for row in rows:
        steps = next((r.tuning for r in row.records if r.tuning), ())
        speeds = columns_of([finite(t.throughput_tok_s) for t in steps])
        bodies += [
            Body(
                tuple(
                    (
                        Cell(str(t.gpu_batch_size), badges=("chosen",) * (t.gpu_batch_size == row.batch)),
                        Cell(t.status, tone="good" if t.status == "ok" else "muted"),
                        Cell(speed, why="" if speed != MISSING else "the trial did not finish"),
                        Cell(one_line(t.reason)),
                    )
                    for t, speed in zip(steps, speeds, strict=True)
                ),
                heading=row.name,
            )
        ] * bool(steps)
    columns = (
        Column("Batch", numeric=False),
        Column("Status", numeric=False),
        Column("Throughput", "tok/s"),
        Column("Reason", numeric=False, wide=True),
    )
    return Table("What was tried, in order", columns, tuple(bodies)) if bodies else None


def machine_rates(records: Iterable[RunRecord]) -> Table | None:
    """Disk and GEMM rates of every machine probe of the run; None if it was never probed."""
    found = {r.machine.measured_at or str(i): r.machine for i, r in enumerate(_in_time(records)) if r.machine}
    curves: dict[tuple[str, str], list[list[float]]] = {}
    shapes = set()
    for profile in found.values():
        if profile.disk_read:
            curves.setdefault(("Disk read", "GB/s"), []).append([v / 1e9 for v in profile.disk_read])
        if profile.h2d:
            curves.setdefault(("Copies to the device", "GB/s"), []).append([v / 1e9 for v in profile.h2d])
        where = "on the device " if profile.h2d else ""
        for dtype, by_rows in profile.gemm_flops.items():
            for count, samples in by_rows.items():
                name = f"GEMM {where}{dtype}, {count} {'row' if count == '1' else 'rows'}"
                curves.setdefault((name, "GFLOP/s"), []).append([v / 1e9 for v in samples])
        if profile.gemm_shape and profile.gemm_flops:
            shapes.add("x".join(map(str, profile.gemm_shape)))
    lines = []
    for (name, unit), probes in sorted(curves.items(), key=lambda c: _natural(c[0][0])):
        rates = [v for probe in probes for v in probe if finite(v) is not None]
        if not rates:
            continue
        medians = [m for probe in probes if (m := median([finite(v) for v in probe])) is not None]
        middle = median(medians) or 0
        low, mid, high = columns_of([min(rates), middle, max(rates)])
        lines.append(
            (Cell(name), Cell(unit), Cell(mid), Cell(low), Cell(high), Cell(str(len(medians))), _spark_cell(medians))
        )
    if not lines:
        return None
    columns = [Column(t, numeric=t not in {"Rate", "Unit", "Over the run"}) for t in _RATE_COLUMNS]
    matrices = f" GEMM is x[rows, k] times W[k, n] with k x n = {', '.join(sorted(shapes))}." if shapes else ""
    return plain_table(f"Rates measured beside the run.{matrices}", columns, lines)


_RATE_COLUMNS = ("Rate", "Unit", "Median", "Lowest", "Highest", "Probes", "Over the run")


def setup(rows: Sequence[CellSummary]) -> Table | None:
    """How each cell was really set: what it ran in, its engine's packages, and what the engine said when it loaded."""
    lines = []
    for row in rows:
        record = next((r for r in row.records if r.load), None)
        if record is None or record.load is None or record.simulated:
            continue
        known = record.provenance
        packages = known.get("packages")
        versions = ", ".join(f"{n} {v}" for n, v in packages.items()) if isinstance(packages, dict) else ""
        inside = f"{known['image']} {str(known.get('image_digest', ''))[:19]}" if "image" in known else ""
        where = inside or str(known.get("environment", "")) or record.spec.launcher
        notes = one_line("; ".join(record.load.notes)) or MISSING
        lines.append((Cell(row.name), Cell(where), Cell(one_line(versions) or MISSING), Cell(notes)))
    columns = [Column(title, numeric=False, wide=True) for title in ("Cell", "Runs in", "Packages", "As loaded")]
    return plain_table("How each cell was set", columns, lines) if lines else None


def provenance(records: Sequence[RunRecord]) -> Table | None:
    """What the records say about machine, versions, commit and the data of tasks; values that differ are listed with
    their counts."""
    values: dict[str, dict[str, int]] = {}
    for record in records:
        data = {f"sha256.{name}": digest for name, digest in record.accuracy.files.items()} if record.accuracy else {}
        for key, value in (_in_words(record.provenance) | data).items():
            counts = values.setdefault(key, {})
            counts[value] = counts.get(value, 0) + 1
    lines = [(Cell(key), _value_cell(counts)) for key, counts in values.items()]
    columns = (Column("Item", numeric=False), Column("Value", numeric=False, wide=True))
    return plain_table("Machine, versions and commit", columns, lines) if lines else None


def commit(records: Sequence[RunRecord]) -> str:
    """The commit the records were made at, shortened; empty where none or several are recorded."""
    states = [_in_words(r.provenance) for r in records]
    found = {state.get("git.commit", "") for state in states}
    if len(found) != 1:
        return ""
    changed = any(state.get("git.dirty") == "True" for state in states)
    return found.pop()[:12] + (", with local changes" if changed else "")


def commands(rows: Sequence[CellSummary]) -> list[tuple[str, str]]:
    """(cells, exact command) of the cells whose command was recorded; those of one command together."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.records[-1].command:
            found.setdefault(row.records[-1].command, []).append(row.name)
    return [(", ".join(names), command) for command, names in found.items()]


def period(records: Sequence[RunRecord]) -> str:
    """When the first and the last record were started, as recorded."""
    times = sorted(r.started_at for r in records if r.started_at)
    ends = [t.replace("T", " ").replace("+00:00", " UTC") for t in (*times[:1], *times[1:][-1:])]
    return " to ".join(ends)


def _in_time(records: Iterable[RunRecord]) -> list[RunRecord]:
    return sorted(records, key=lambda r: r.started_at)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts 8 rows before 64 rows."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in name.split()]


def _spark(samples: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Points (x, y) in percent for samples over the run, zero at the bottom and the largest near the top."""
    top = max(samples, default=0) or 1
    width = max(len(samples) - 1, 1)
    return tuple((4 + 92 * i / width, 90 - 75 * v / top) for i, v in enumerate(samples))


def _spark_cell(medians: Sequence[float]) -> Cell:
    words = ", ".join(number(v) for v in medians[:50])
    return Cell("", why=f"one point a probe: {words}", spark=_spark(medians))


def _in_words(known: Mapping[str, Any]) -> dict[str, str]:
    """Nested data as `a.b: text`; lists are joined, None and empty values left out."""
    out = {}
    for key, value in flat(known).items():
        if isinstance(value, list | tuple):
            out[key] = ", ".join(_words(v) for v in value)
        elif key.endswith("_bytes") and (size := finite(value)) is not None:
            out[key.removesuffix("_bytes")] = f"{number(size / GIB)} GiB"
        else:
            out[key] = "" if value is None else str(value)
    return {key: text for key, text in out.items() if text}


def _words(item: Any) -> str:
    return " ".join(map(str, item.values())) if isinstance(item, Mapping) else str(item)


def _value_cell(counts: Mapping[str, int]) -> Cell:
    if len(counts) == 1:
        return Cell(next(iter(counts)))
    shown = [f"{value} ({count} records)" for value, count in list(counts.items())[:4]]
    more = [f"and {len(counts) - 4} more"] if len(counts) > 4 else []
    return Cell("; ".join(shown + more), badges=("differs",))
