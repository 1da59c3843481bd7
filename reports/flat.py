"""The CSV report: one line a record, columns in a fixed order, full precision, base units."""

import csv
import io
from collections.abc import Sequence

from harness.api import RunRecord
from reports.rates import with_rates_around
from reports.records import command_of
from reports.summary import measured_peak, measured_sum
from reports.text import csv_field, finite, grouped, median

METRICS = (
    "generation_throughput_tok_s",
    "decode_throughput_tok_s",
    "total_throughput_tok_s",
    "padded_throughput_tok_s",
    "total_s",
    "prefill_s",
    "decode_s",
    "generated_tokens",
    "prompt_tokens",
    "padding_tokens",
    "num_requests",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p50_s",
    "tpot_p99_s",
    "launch_s",
    "import_s",
)


_MEMORY = ("method", "idle_bytes", "budget_bytes", "limit_bytes", "peak_bytes")


def to_csv(records: Sequence[RunRecord]) -> str:
    """CSV text with a header, cells in order of their first record; an empty field is not measured, and no field is a
    spreadsheet formula."""
    lines = [{name: csv_field(value) for name, value in row.items()} for row in rows(records)]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def rows(records: Sequence[RunRecord]) -> list[dict[str, object]]:
    """The figures of each record by column, as they are; None is not measured. In order as `to_csv` has them."""
    cells = grouped(with_rates_around(records), lambda r: r.fingerprint).values()
    return [_row(r) for repeats in cells for r in sorted(repeats, key=lambda r: r.repeat)]


def _row(record: RunRecord) -> dict[str, object]:
    spec, load, memory, bound = record.spec, record.load, record.memory, record.bound
    values: dict[str, object] = {
        "suite": spec.suite,
        "name": spec.name,
        "fingerprint": record.fingerprint,
        "repeat": record.repeat,
        "engine": spec.engine,
        "model": spec.model.id,
        "weights": spec.model.weights,
        "weights_dtype": record.model.dtype if record.model else spec.model.dtype,
        "prompt_len": spec.workload.prompt_len,
        "gen_len": spec.workload.gen_len,
        "seed": spec.seed,
        "batch": load.block_size if load else None,
        "compute_dtype": load.compute_dtype if load else None,
        "reference": spec.reference,
        "simulated": record.simulated,
        "status": record.status,
        "expect": spec.expect,
        "reason": record.reason,
        "started_at": record.started_at,
        "wall_s": record.wall_s,
    }
    values |= {name: finite(record.metrics.get(name)) for name in METRICS}
    values["load_s"] = measured_sum(record, "wall_s", "load")
    values |= {
        "bound_tok_s": bound.throughput_tok_s if bound else None,
        "bound_compute_s": bound.compute_s if bound else None,
        "bound_disk_s": bound.disk_s if bound else None,
        "bound_limited_by": bound.limited_by if bound else None,
        "job_bound_tok_s": record.job_bound.throughput_tok_s if record.job_bound else None,
        **{f"memory_{name}": getattr(memory, name, None) for name in _MEMORY},
        "rss_anon_peak_bytes": measured_peak(record, "rss_anon_bytes"),
        "rss_file_peak_bytes": measured_peak(record, "rss_file_bytes"),
    }
    for counter in ("read_bytes", "write_bytes"):
        values |= {f"{phase}_{counter}": measured_sum(record, counter, phase) for phase in ("load", "generate")}
    values["generate_energy_j"] = measured_sum(record, "energy_j", "generate")
    values["generate_device_energy_j"] = measured_sum(record, "device_energy_j", "generate")
    values["predicted_tok_s"] = record.predicted.throughput_tok_s if record.predicted else None
    values["disk_read_bytes_s"] = median(record.machine.disk_read) if record.machine else None
    values["command"] = command_of(record)
    return values
