"""Several ranks of one host against one rank: throughput with and without the prefill, and what each rank did.

Source: FlexGen (Sheng et al. 2023), section 4.4 and table 3: generation throughput counts everything, decoding
throughput leaves the prefill out. Here that is what comes after every request has had its first token: groups of
sequences that are under way at the same time decode beside the prefill of others before.
"""

from collections.abc import Sequence

from harness.api import RunRecord
from reports.records import Runs
from reports.summary import CellSummary, metric, summary_rows
from reports.tables import Body, Cell, Column, Table, name_cell
from reports.text import MB, MISSING, TIMES_SIGN, columns_of, finite, grouped, median, number, quotient

_WHY = "not recorded, or not predicted"
#: The most ranks of a cell that are shown.
_MOST_RANKS = 64


def ranks_tables(runs: Runs) -> tuple[Table, ...]:
    """Of each machine's cells with several ranks and no links between them: against the fastest cell of one rank with
    the same model and lengths, and rank by rank. Empty where no cell has ranks."""
    tables = []
    for records in runs.by_machine:
        rows = [row for row in summary_rows(records) if row.ok and not row.reference]
        of_ranks = [row for row in rows if row.spec.policy.ranks > 1 and not row.spec.limits.link]
        if of_ranks:
            of_ranks.sort(key=lambda row: row.spec.policy.ranks)
            tables += [_against_one(of_ranks, rows), _by_rank(of_ranks)]
    return tuple(tables)


def decode_rate(records: Sequence[RunRecord]) -> float | None:
    """Tokens/s after the last of the first tokens, median over records; of simulated ones what the simulation says."""
    return median([_decode_rate(r) or finite(r.metrics.get("decode_throughput_tok_s")) for r in records])


def share(row: CellSummary, rank: int, predicted: bool = False) -> float | None:
    """The share of the run that a rank was without work."""
    name = f"rank{rank}_idle_share"
    if not predicted:
        return metric(row.ok_records, name)
    return median([finite(r.predicted.metrics.get(name)) for r in row.ok_records if r.predicted])


def _against_one(of_ranks: Sequence[CellSummary], rows: Sequence[CellSummary]) -> Table:
    """Throughput of each cell and over that of one rank."""

    def job(row: CellSummary) -> tuple[str, str]:
        return row.workload, row.kind

    single = grouped([row for row in rows if row.spec.policy.ranks == 1 and row.spec.limits.link is None], job)
    lines, figures = [], []
    for job_of, cells in grouped(of_ranks, job).items():
        alone = max(single.get(job_of, ()), key=lambda row: row.median or 0.0, default=None)
        for row in [*([alone] if alone else []), *cells]:
            ranks = _ranks(row)
            speeds = [row.median, decode_rate(row.ok_records)]
            ones = [alone.median, decode_rate(alone.ok_records)] if alone else [None, None]
            idle = [_mean([share(row, rank, kind) for rank in ranks]) for kind in (False, True)]
            lines.append([name_cell(row), Cell(str(row.spec.policy.ranks))])
            figures.append([row.median, row.predicted_tok_s, speeds[1], *map(quotient, speeds, ones),
                            *(100 * one if one is not None else None for one in idle)])  # fmt: skip
    columns = (
        Column("Cell", numeric=False), Column("Ranks"), Column("Generation", "tok/s"),
        Column("Generation, predicted", "tok/s"), Column("Decode", "tok/s"),
        Column("Generation", f"{TIMES_SIGN} one rank"), Column("Decode", f"{TIMES_SIGN} one rank"),
        Column("Idle", "% of a rank's time"), Column("Idle, predicted", "%"),
    )  # fmt: skip
    caption = f"Ranks against one rank. {_host(of_ranks)}"
    return Table(caption, columns, (Body(_with_numbers(lines, figures)),))


def _by_rank(of_ranks: Sequence[CellSummary]) -> Table:
    """What each rank of each cell did."""
    lines, figures, sizes = [], [], []
    for row in of_ranks:
        ranks = _ranks(row)
        sizes.append(len(ranks))
        for rank in ranks:
            idle = [share(row, rank, kind) for kind in (False, True)]
            moved = [metric(row.ok_records, f"rank{rank}_{what}") for what in ("sent_bytes", "weight_bytes_read")]
            lines.append([Cell(f"rank {rank}")])
            figures.append([metric(row.ok_records, f"rank{rank}_busy_s"),
                            *(100 * one if one is not None else None for one in idle),
                            *(quotient(one, MB) for one in moved)])  # fmt: skip
    whole = iter(_with_numbers(lines, figures))
    bodies = [
        Body(tuple(next(whole) for _ in range(size)), row.name) for row, size in zip(of_ranks, sizes, strict=True)
    ]
    columns = (
        Column("Rank", numeric=False), Column("At work", "s"), Column("Idle", "%"), Column("Idle, predicted", "%"),
        Column("Sent", "MB"), Column("Weights read", "MB"),
    )  # fmt: skip
    return Table("What each rank did, median over repeats", columns, tuple(bodies)).first()


def _decode_rate(record: RunRecord) -> float | None:
    times = [[s for t in trace.token_times_s if (s := finite(t)) is not None] for trace in record.requests]
    if not all(times) or not times:
        return None
    last_first = max(each[0] for each in times)
    later = [t for each in times for t in each if t > last_first]
    return quotient(float(len(later)), max(later) - last_first) if later else None


def _ranks(row: CellSummary) -> range:
    return range(min(row.spec.policy.ranks, _MOST_RANKS))


def _host(rows: Sequence[CellSummary]) -> str:
    """What the ranks share, in words."""
    machines = [row.records[-1].provenance.get("machine") for row in rows]
    cores = {finite(machine.get("cores_usable")) for machine in machines if isinstance(machine, dict)} - {None}
    words = (" or ".join(number(count) for count in sorted(filter(None, cores))), "cores")
    return (
        f"All ranks of a cell are processes of one host and share its disk and its {' '.join(filter(None, words))}: "
        "memory, bytes and waiting are those of machines of their own, times of arithmetic are not."
    )


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def _with_numbers(
    lines: Sequence[Sequence[Cell]], figures: Sequence[Sequence[float | None]]
) -> tuple[tuple[Cell, ...], ...]:
    """The lines, each followed by its figures, which are written column by column."""
    texts = zip(*(columns_of(column) for column in zip(*figures, strict=True)), strict=True)
    return tuple(
        (*line, *(Cell(text, why=_WHY if text == MISSING else "") for text in row))
        for line, row in zip(lines, texts, strict=True)
    )
