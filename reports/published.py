"""What papers published for the same model and workload, beside what was measured or simulated here."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from harness.common.published import published_rows
from reports.summary import CellSummary, ranked
from reports.tables import Cell, Column, Table, plain_table
from reports.text import MISSING, TIMES_SIGN, columns_of, number

#: Of each table: the paper and its table, the machine, and the prompts where no column gives them.
_SOURCES = {
    "flexgen_throughput_t4": ("FlexGen (Sheng et al. 2023), tables 14 to 16: one T4 16 GB, 208 GB of RAM, NVMe", None),
    "lm_offload_a100": ("LM-Offload (Wu et al. 2024), table 3: one A100 40 GB, 240 GB of RAM", 64),
}


def published_table(rows: Sequence[CellSummary], reproduces: Collection[str]) -> Table | None:
    """A row for each system that the paper has for these cells' model and lengths; None where there is none."""
    lines, sources = [], []
    best = next(iter(ranked(rows)), None)
    for name in sorted(set(reproduces) & set(_SOURCES)):
        source, prompts = _SOURCES[name]
        found = [row for row in published_rows(name) if _is_of(row, rows[0], prompts)]
        speeds = columns_of([float(row["throughput"]) if row["throughput"] else None for row in found])
        for row, speed in zip(found, speeds, strict=True):
            lines.append([Cell(row["system"]), Cell(_policy(row)), _figure(row, speed), _ours(best, row)])
        sources += [source] * bool(found)
    if not lines:
        return None
    which = f"{best.name}, {_kind(best)}" if best else "no cell of ours"
    columns = [Column("Published system", numeric=False), Column("Its policy", numeric=False, wide=True),
               Column("Published", "tok/s"), Column("Ours", f"{TIMES_SIGN} published")]  # fmt: skip
    return plain_table(f"Published beside ours ({which}). {'; '.join(sources)}.", columns, lines)


def _is_of(row: dict[str, str], cell: CellSummary, prompts: int | None) -> bool:
    spec = cell.records[-1].spec
    if spec.workload.kind != "synthetic":
        return False
    asked = int(row["prompt_len"]) if prompts is None else prompts
    model = spec.model.id.rpartition("/")[2].lower()
    return (model, spec.workload.prompt_len, spec.workload.gen_len) == (row["model"], asked, int(row["gen_len"]))


def _policy(row: dict[str, str]) -> str:
    """Of weights, cache and activations, percent on the device and on the host, as the paper's tables have them."""
    batch = row.get("batch") or " x ".join(v for k in ("gpu_batch_size", "num_gpu_batches") if (v := row.get(k)))
    placed = [f"{name} {row[first]}/{row[second]}" if row.get(second) else f"{name} {row[first]}"
              for name, first, second in (("weights", "wg", "wc"), ("cache", "cg", "cc"), ("activations", "hg", "hc"))
              if row.get(first)]  # fmt: skip
    return ", ".join([f"batch {batch}"] * bool(batch) + placed)


def _figure(row: dict[str, str], speed: str) -> Cell:
    return Cell(speed if row["throughput"] else MISSING, why="" if row["throughput"] else "out of memory")


def _ours(best: CellSummary | None, row: dict[str, str]) -> Cell:
    if best is None or best.median is None or not row["throughput"] or not float(row["throughput"]):
        return Cell(MISSING, why="nothing to compare")
    return Cell(number(best.median / float(row["throughput"])))


def _kind(row: CellSummary) -> str:
    return "simulated" if row.simulated else "projected" if row.projected else "measured"
