"""Published throughput for the same model and workload, compared with ours."""

from collections.abc import Collection, Sequence

from harness.common.published import published_rows
from reports.summary import CellSummary, ranked
from reports.tables import Cell, Column, Table, plain_table
from reports.text import MISSING, TIMES_SIGN, columns_of, number

#: For each table: paper and machine, and the prompt length where the table has no column for it.
_SOURCES = {
    "flexgen_throughput_t4": ("FlexGen (Sheng et al. 2023), tables 14 to 16: one T4 16 GB, 208 GB of RAM, NVMe", None),
    "moe_lightning_t4": (
        "MoE-Lightning (Cao et al. 2024), its first setting: one T4 16 GB, 192 GB of RAM, prompts of MTBench",
        None,
    ),
    "lm_offload_a100": ("LM-Offload (Wu et al. 2024), table 3: one A100 40 GB, 240 GB of RAM", 64),
}


def published_table(rows: Sequence[CellSummary], reproduces: Collection[str]) -> Table | None:
    """A row for each published result with these cells' model and lengths; a table that says so if a paper has none.

    None if no suite reproduces a paper's table.
    """
    lines = []
    sources: list[str] = []
    silent: list[str] = []
    best = next(iter(ranked(rows)), None)
    for name in sorted(set(reproduces) & set(_SOURCES)):
        source, prompt_len = _SOURCES[name]
        published = [row for row in published_rows(name) if _has_workload(row, rows[0], prompt_len)]
        speeds = columns_of([float(row["throughput"]) if row["throughput"] else None for row in published])
        for row, speed in zip(published, speeds, strict=True):
            published_speed = Cell(speed, why="" if row["throughput"] else "out of memory")
            lines.append([Cell(row["system"]), Cell(_policy(row)), published_speed, _ours(best, row)])
        (sources if published else silent).append(source)
    if not sources and not silent:
        return None
    if not sources:
        return plain_table(f"No published results for this model and these lengths in {'; '.join(silent)}.", [], [])
    cell = f"{best.name}, {best.kind}" if best else "no ranked cell"
    columns = [Column("Published system", numeric=False), Column("Its policy", numeric=False, wide=True),
               Column("Published", "tok/s"), Column("Ours", f"{TIMES_SIGN} published")]  # fmt: skip
    return plain_table(f"Published results and ours ({cell}). {'; '.join(sources)}.", columns, lines)


def _has_workload(row: dict[str, str], cell: CellSummary, prompt_len: int | None) -> bool:
    spec = cell.spec
    if spec.workload.kind != "synthetic":
        return False
    prompt_len = int(row["prompt_len"]) if prompt_len is None else prompt_len
    model = spec.model.id.rpartition("/")[2].lower()
    return (model, spec.workload.prompt_len, spec.workload.gen_len) == (row["model"], prompt_len, int(row["gen_len"]))


def _policy(row: dict[str, str]) -> str:
    """The published batch, and percentages of weights, cache and activations on device/host as in the paper."""
    batch = row.get("batch") or " x ".join(v for k in ("gpu_batch_size", "num_gpu_batches") if (v := row.get(k)))
    placement = [f"{name} {row[device]}/{row[host]}" if row.get(host) else f"{name} {row[device]}"
                 for name, device, host in (("weights", "wg", "wc"), ("cache", "cg", "cc"), ("activations", "hg", "hc"))
                 if row.get(device)]  # fmt: skip
    return ", ".join([f"batch {batch}"] * bool(batch) + placement)


def _ours(best: CellSummary | None, row: dict[str, str]) -> Cell:
    if best is None or best.median is None or not row["throughput"] or not float(row["throughput"]):
        return Cell(MISSING, why="nothing to compare")
    return Cell(number(best.median / float(row["throughput"])))
