"""The figures of cells by table: how to compute each one, its unit, and why it may be missing."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from harness.api import OffloadPolicy
from reports.summary import CellSummary, measured_peak, measured_sum, metric, per_token
from reports.tables import Figure, status_cell
from reports.text import MB, MIB, TIMES_SIGN, finite, largest, median, quotient, span


def allowed(row: CellSummary, resource: str) -> float | None:
    """The throughput (tokens/s) that one resource of the bound allows; None where the cell does not need it."""
    timed = [(bound, getattr(bound, resource)) for bound in (r.bound for r in row.ok_records) if bound]
    return median([finite(b.throughput_tok_s * b.longest_s / seconds) for b, seconds in timed if seconds > 0])


def _range(row: CellSummary) -> str | None:
    """The throughputs of the slowest and the fastest repeat."""
    return span(min(row.throughput), max(row.throughput)) if len(row.throughput) > 1 else None


def _read(row: CellSummary) -> float | None:
    """Bytes read per token; 0 below 0.01 MB, which is single pages."""
    read = per_token(row.ok_records, "read_bytes")
    return read if read is None or read > 0.01 * MB else 0.0


def _ratio_interval(row: CellSummary) -> str | None:
    if row.ratio is None or row.ratio.low is None or row.ratio.high is None:
        return None
    return span(row.ratio.low, row.ratio.high)


def _agreement(row: CellSummary) -> str | None:
    return f"{row.equal_outputs} of {row.compared_outputs}" if row.compared_outputs else None


def _memory(row: CellSummary, name: str) -> float | None:
    return largest(getattr(r.memory, name) for r in row.records if r.memory)


def _real_share(row: CellSummary) -> float | None:
    """The median share of computed positions that are not padding."""
    names = ("total_throughput_tok_s", "padded_throughput_tok_s")
    return median([quotient(*(finite(r.metrics.get(name)) for name in names)) for r in row.ok_records])


def _peak(row: CellSummary, name: str) -> float | None:
    return largest(measured_peak(r, name) for r in row.records)


def _method(row: CellSummary) -> str | None:
    memories = [r.memory for r in row.records if r.memory]
    if not memories:
        return None
    return f"{memories[-1].method}, {'with' if memories[-1].counts_page_cache else 'without'} page cache"


def _of(name: str) -> Callable[[CellSummary], float | None]:
    """A function from a cell to the median of a metric."""
    return lambda row: metric(row.ok_records, name)


def task_seconds(row: CellSummary, task: str, predicted: bool = False) -> float | None:
    """A task's seconds, measured or predicted; None where a measured task did nothing, but a wait may be 0 s."""
    if predicted:
        return median([r.predicted.metrics.get(f"task_{task}_s") for r in row.ok_records if r.predicted])
    seconds = metric(row.ok_records, f"task_{task}_s")
    return seconds if task == "waiting" else seconds or None


def task_ms_per_token(row: CellSummary, task: str) -> float | None:
    """A task's milliseconds for a generated token: jobs of cells differ in size. None as `task_seconds`."""
    ratios = [quotient(finite(r.metrics.get(f"task_{task}_s")), finite(r.metrics.get("generated_tokens")))
              for r in row.ok_records]  # fmt: skip
    seconds = median(ratios)
    if seconds is None or not (seconds or task == "waiting"):
        return None
    return 1000 * seconds


def realised_policy(row: CellSummary) -> OffloadPolicy | None:
    """The policy as the engine realised it; None for engines without placement."""
    policies = [r.load.policy for r in row.ok_records if r.load and r.load.policy and r.load.policy.weights]
    return policies[-1] if policies else None


def _placed(row: CellSummary, name: str) -> Any:
    return getattr(realised_policy(row), name, None)


def _in_tiers(row: CellSummary, kind: str, tiers: Sequence[int]) -> float | None:
    """The share of a policy's weights or KV cache that lies in some of device, host and disk."""
    fractions = _placed(row, kind)
    return None if fractions is None else sum(fractions[tier] for tier in tiers)


_UNRANKED = "not ranked: a reference, incomplete, or without a rival"
_NO_INTERVAL = "not ranked, or fewer than three launches"
_NO_TIMES = "the engine does not separate prefill from decode"
_NO_BOUND = "no machine probe ran with this cell"
_NO_TIMELINE = "the engine keeps no timeline"
_NO_PLACEMENT = "the engine does not report its placement"
_NO_FORECAST = "no performance model covers this cell"
_NO_COUNTER = "this machine has no counter for it"

_OF_JOB = Figure("Of job's bound", "%", lambda r: r.job_fraction, _NO_BOUND, scale=0.01)
_OF_BATCH = Figure("Of batch's bound", "%", lambda r: r.bound_fraction, _NO_BOUND, scale=0.01)

#: What decides stands first: a telephone shows two columns beside the cells.
SUMMARY = (
    Figure("Throughput", "tok/s", lambda r: r.median, "not recorded"),
    Figure("To best rival", TIMES_SIGN, lambda r: r.ratio.ratio if r.ratio else None, _UNRANKED),
    Figure("95 % interval", TIMES_SIGN, _ratio_interval, _NO_INTERVAL),
    Figure("Range", "tok/s", _range, "needs two repeats"),
    Figure("Status", "", status_cell, "", numeric=False),
    _OF_JOB,
    _OF_BATCH,
    Figure("Limited by", "", lambda r: r.limited_by, _NO_BOUND, numeric=False),
    Figure("Batch", "", lambda r: r.batch, "the batch search chose none"),
    Figure("Compute", "dtype", lambda r: r.compute_dtype, "the engine did not load", numeric=False),
    Figure("Peak memory", "MiB", lambda r: r.peak_bytes, "not measured", scale=MIB),
    Figure("Limit", "MiB", lambda r: r.limit_bytes, "no limit", scale=MIB),
    Figure("Read", "MB/token", _read, _NO_COUNTER, scale=MB),
    Figure("Same output", "", _agreement, "no reference cell with this seed finished"),
)
SUMMARY_SHORT = tuple(f for f in SUMMARY if f.title not in {"Range", "Compute"})

_TOTALS = (
    Figure("Total", "tok/s", _of("total_throughput_tok_s"), "not recorded"),
    Figure("Padded", "tok/s", _of("padded_throughput_tok_s"), "not recorded"),
)
_LOAD = Figure("Load", "s", lambda r: median([measured_sum(x, "wall_s", "load") for x in r.ok_records]), "not recorded")

TIMES = (
    Figure("Requests", "", lambda r: r.num_requests, "not recorded"),
    Figure("TTFT p50", "s", _of("ttft_p50_s"), "not recorded"),
    Figure("TTFT p99", "s", _of("ttft_p99_s"), "not recorded"),
    Figure("TPOT p50", "s", _of("tpot_p50_s"), "needs two tokens a request"),
    Figure("TPOT p99", "s", _of("tpot_p99_s"), "needs two tokens a request"),
    Figure("Prefill", "s", _of("prefill_s"), _NO_TIMES),
    Figure("Decode", "s", _of("decode_s"), _NO_TIMES),
    Figure("Decode", "tok/s", _of("decode_throughput_tok_s"), _NO_TIMES),
    Figure("Block", "s", _of("block_latency_s"), "predictions only"),
    *_TOTALS,
    _LOAD,
)

PADDING = (
    *_TOTALS,
    Figure("Real", "%", _real_share, "not recorded", scale=0.01),
    Figure("Generation", "tok/s", _of("generation_throughput_tok_s"), "no tokens generated"),
    _LOAD,
    Figure("Wall", "s", lambda r: median([x.wall_s for x in r.ok_records]), "not recorded"),
)

MEMORY = (
    Figure("Peak", "MiB", lambda r: r.peak_bytes, "not measured", scale=MIB),
    Figure("Limit", "MiB", lambda r: r.limit_bytes, "no limit", scale=MIB),
    Figure("Idle", "MiB", lambda r: _memory(r, "idle_bytes"), "not recorded", scale=MIB),
    Figure("Budget", "MiB", lambda r: _memory(r, "budget_bytes"), "no limit", scale=MIB),
    Figure("Anonymous RSS", "MiB", lambda r: _peak(r, "rss_anon_bytes"), "not sampled", scale=MIB),
    Figure("File RSS", "MiB", lambda r: _peak(r, "rss_file_bytes"), "not sampled", scale=MIB),
    Figure("Enforced by", "", _method, "not recorded", numeric=False),
)

BOUND = (
    Figure("Measured", "tok/s", lambda r: r.median, "not recorded"),
    Figure("Compute allows", "tok/s", lambda r: allowed(r, "compute_s"), "the bound has no compute time"),
    Figure("Disk allows", "tok/s", lambda r: allowed(r, "disk_s"), "the budget holds all weights"),
    Figure("Batch's bound", "tok/s", lambda r: r.bound_tok_s, _NO_BOUND),
    _OF_BATCH,
    Figure("Limited by", "", lambda r: r.limited_by, _NO_BOUND, numeric=False),
    Figure("Job's bound", "tok/s", lambda r: r.job_bound_tok_s, _NO_BOUND),
    _OF_JOB,
    Figure("Rows a pass", "", _of("rows_per_pass"), _NO_TIMELINE),
    Figure("Disk hidden", "%", _of("disk_hidden"), _NO_TIMELINE, scale=0.01),
)
#: BOUND for cells of which some have a device.
BOUND_OF_DEVICE = (
    *BOUND[:3],
    Figure("Link allows", "tok/s", lambda r: allowed(r, "link_s"), "the device holds all weights, or there is none"),
    *BOUND[3:],
)

PREDICTED = (
    Figure("Predicted", "tok/s", lambda r: r.predicted_tok_s, _NO_FORECAST),
    Figure("Measured", "tok/s", lambda r: r.median, "not recorded"),
    Figure("Prediction error", "%", lambda r: r.prediction_error, _NO_FORECAST, scale=0.01),
    *(
        Figure(f"{title}, {kind}", "s", partial(task_seconds, task=task, predicted=kind == "predicted"), _NO_FORECAST)
        for title, task in (("Products", "products"), ("Attention", "attention"), ("Waits", "waiting"))
        for kind in ("predicted", "measured")
    ),
)

TASK_NAMES = {
    "load_weights": "load weights",
    "load_cache": "load cache",
    "store_cache": "store cache",
    "move_activations": "activations",
    "products": "products",
    "attention": "attention",
    "other": "other",
}
TASKS = (
    Figure("All together", "ms/token", lambda r: quotient(1000.0, r.median), "not recorded"),
    *(
        Figure(name.capitalize(), "ms/token", partial(task_ms_per_token, task=task), "this task did nothing")
        for task, name in {**TASK_NAMES, "waiting": "compute waits"}.items()
    ),
)

#: Placement and storage of weights and KV cache; memory is device and host memory.
PLACEMENT = (
    Figure("Weights in memory", "%", partial(_in_tiers, kind="weights", tiers=(0, 1)), _NO_PLACEMENT, scale=0.01),
    Figure("Weights on disk", "%", partial(_in_tiers, kind="weights", tiers=(2,)), _NO_PLACEMENT, scale=0.01),
    Figure("Cache in memory", "%", partial(_in_tiers, kind="cache", tiers=(0, 1)), _NO_PLACEMENT, scale=0.01),
    Figure("Cache on disk", "%", partial(_in_tiers, kind="cache", tiers=(2,)), _NO_PLACEMENT, scale=0.01),
    Figure("Weights", "bits", partial(_placed, name="weight_bits"), _NO_PLACEMENT),
    Figure("Cache", "bits", partial(_placed, name="kv_bits"), _NO_PLACEMENT),
    Figure("Schedule", "", partial(_placed, name="schedule"), _NO_PLACEMENT, numeric=False),
)
