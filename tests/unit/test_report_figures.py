"""Every figure of a report's tables is of the field that its heading names, in its unit."""

from dataclasses import replace

import pytest

from harness.api import HardwareLimits, OffloadPolicy
from reports.figures import BOUND, MEMORY, PADDING, PLACEMENT, TASKS, TIMES
from reports.summary import summary_rows
from tests.records import GIB, cell, failed, record


def row_of(*records):
    """The summary of the only cell."""
    (row,) = summary_rows(list(records))
    return row


def shown(figures, row):
    """What each column shows, by heading and unit."""
    values = {}
    for figure in figures:
        value = figure.get(row)
        values[figure.title, figure.unit] = value / figure.scale if isinstance(value, int | float) else value
    return values


def test_placement_is_what_the_engine_made_of_the_policy():
    """Device and host are memory; of two launches the later one counts; without a placement there is nothing."""
    placed = OffloadPolicy(
        weights=(0.25, 0.5, 0.25), cache=(0.125, 0.5, 0.375), weight_bits=4, kv_bits=8, schedule="zigzag"
    )
    earlier = replace(placed, weights=(0.0, 0.0, 1.0))
    launches = [record(cell(), i) for i in range(2)]
    row = row_of(*(replace(launch, load=replace(launch.load, policy=policy))
                   for launch, policy in zip(launches, (earlier, placed), strict=True)))  # fmt: skip
    assert shown(PLACEMENT, row) == {
        ("Weights in memory", "%"): 75, ("Weights on disk", "%"): 25, ("Cache in memory", "%"): 62.5,
        ("Cache on disk", "%"): 37.5, ("Weights", "bits"): 4, ("Cache", "bits"): 8, ("Schedule", ""): "zigzag",
    }  # fmt: skip
    assert set(shown(PLACEMENT, row_of(record(cell()))).values()) == {None}


def test_memory_is_the_largest_of_all_launches_even_of_those_that_failed():
    small = record(cell(), 0)
    large = replace(small.memory, idle_bytes=GIB, peak_bytes=3 * GIB, counts_page_cache=False)
    row = row_of(small, failed(cell(), "oom_host", "killed", 1, memory=large))
    assert shown(MEMORY, row) == {
        ("Peak", "MiB"): 3072, ("Limit", "MiB"): 1536, ("Idle", "MiB"): 1024, ("Budget", "MiB"): 1024,
        ("Anonymous RSS", "MiB"): 768, ("File RSS", "MiB"): 256, ("Enforced by", ""): "cgroup-v2, without page cache",
    }  # fmt: skip
    free = row_of(record(cell(limits=HardwareLimits()), memory=None, measurements=()))
    assert set(shown(MEMORY, free).values()) == {None}


def test_times_are_medians_of_launches():
    """Of speeds 1, 2 and 4 tok/s for 64 tokens."""
    row = row_of(*(record(cell(), i, speed) for i, speed in enumerate((1.0, 2.0, 4.0))))
    times = shown(TIMES, row)
    assert times["Requests", ""] == 4
    assert (times["TTFT p50", "s"], times["TTFT p99", "s"]) == (8.0, 12.0)
    assert (times["TPOT p50", "s"], times["TPOT p99", "s"]) == pytest.approx((2.0, 2.2))
    assert (times["Prefill", "s"], times["Decode", "s"], times["Decode", "tok/s"]) == (8.0, 24.0, 2.5)
    assert times["Block", "s"] is None and times["Load", "s"] == 5.0
    assert (times["Total", "tok/s"], times["Padded", "tok/s"]) == (18.0, 18.0)


def test_padding_is_told_from_work():
    launch = record(cell(), wall_s=70.0)
    half = replace(launch, metrics=launch.metrics | {"padded_throughput_tok_s": 36.0})
    padding = shown(PADDING, row_of(half))
    assert (padding["Real", "%"], padding["Generation", "tok/s"], padding["Wall", "s"]) == (50.0, 2.0, 70.0)


def test_the_bound_is_beside_what_was_measured():
    launch = record(cell(), metrics=record(cell()).metrics | {"rows_per_pass": 12.5, "disk_hidden": 0.75})
    bound = shown(BOUND, row_of(launch))
    assert (bound["Measured", "tok/s"], bound["Limited by", ""]) == (2.0, "disk")
    assert bound["Rows a pass", ""] == 12.5 and bound["Disk hidden", "%"] == 75
    assert bound["Batch's bound", "tok/s"] == 4.0 and bound["Of batch's bound", "%"] == pytest.approx(50)
    assert bound["Job's bound", "tok/s"] == 5.0 and bound["Of job's bound", "%"] == pytest.approx(40)
    assert bound["Compute allows", "tok/s"] == pytest.approx(10) and bound["Disk allows", "tok/s"] == pytest.approx(4)


def test_tasks_are_milliseconds_for_a_generated_token():
    """A task that did nothing has no figure; compute that never waited has one."""
    launch = record(cell())
    tasks = shown(TASKS, row_of(replace(launch, metrics=launch.metrics | {
        "task_attention_s": 3.2, "task_load_weights_s": 0.0, "task_waiting_s": 0.0})))  # fmt: skip
    assert tasks["All together", "ms/token"] == 500
    assert tasks["Attention", "ms/token"] == pytest.approx(50)
    assert tasks["Load weights", "ms/token"] is None and tasks["Compute waits", "ms/token"] == 0
