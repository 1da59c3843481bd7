"""Predictions beside measurements: made from a record, taken apart, and told."""

import json
from dataclasses import replace

import pytest

from engines.models.shapes import shape
from engines.planning.forecast import forecast
from harness import api, hardware
from harness.cli.plan import print_explanations
from harness.common.curve import interpolate
from harness.planning import explain as explanation
from tests import records
from tests.records import cell, write

LAPTOP = hardware.load("laptop_cpu")
MODEL = "facebook/opt-125m"
ROWS, FREE = api.OffloadPolicy(4, schedule="row"), api.HardwareLimits()


def record(policy=ROWS, limits=FREE, **changes):
    """A launch of eight requests that took 10 s for 80 tokens."""
    model, workload = api.ModelSpec(MODEL, "dummy"), api.WorkloadSpec("synthetic", 16, 10)
    spec = cell("a", "offload", model=model, workload=workload, policy=policy, limits=limits)
    load = api.LoadReport(50272, 2048, policy.block_size, policy, "float32", (0, 0, 0))
    seconds = {"total_s": 10.0, "task_products_s": 6.0, "task_attention_s": 1.0, "task_waiting_s": 2.0}
    known = {
        "requests": tuple(api.RequestTrace(f"r{i}", 16, 10, 0, 0.0, (1.0,) * 10, "length", "") for i in range(8)),
        "metrics": seconds | {"generation_throughput_tok_s": 8.0, "task_other_s": 0.5},
        "model": api.LocalModel("", shape(MODEL), 2 * shape(MODEL).params_total, "bfloat16", ""),
        "machine": None,
    }
    return records.record(spec, load=load, **known | changes)


FORECAST = api.Forecast("local", 10.0, {"total_s": 8.0, "task_products_s": 4.0, "task_attention_s": 1.0,
                                    "task_waiting_s": 2.1, "task_other_s": 0.5})  # fmt: skip


def test_the_parts_add_up_to_the_difference_and_the_largest_is_told_first(tmp_path, capsys):
    out = write(tmp_path, [record(predicted=FORECAST)])
    (one,) = explanation.explain(out / "records.jsonl", "local", tmp_path)
    assert one.error == pytest.approx(0.25)
    apart = {part: measured - predicted for part, (predicted, measured) in one.seconds.items()}
    assert sum(apart.values()) == pytest.approx(10.0 - 8.0)
    assert one.differences() == "products +2 s"
    print_explanations([one], False)
    assert "a #0" in (told := capsys.readouterr().out)
    assert "median error 25.0%" in told
    print_explanations([one], True)
    assert json.loads(capsys.readouterr().out)["median_absolute_error"] == pytest.approx(0.25)


def test_a_record_without_a_prediction_is_predicted_by_the_profile(tmp_path):
    (one,) = explanation.explain(write(tmp_path, [record()]), "laptop_cpu", tmp_path)
    assert one.hardware == "laptop_cpu"
    assert one.predicted_tok_s > 0


@pytest.mark.parametrize(
    ("changes", "profile", "words"),
    [
        ({"status": "oom_host"}, "laptop_cpu", "no finished launch of an engine with a performance model on a host"),
        ({}, "local", "run `harness calibrate`"),
        ({}, "t4_gcp", "t4_gcp has a device"),
    ],
)
def test_records_that_cannot_be_explained_are_refused_with_the_reason(tmp_path, changes, profile, words):
    out = write(tmp_path, [record(**changes)])
    with pytest.raises(api.HarnessError, match=words):
        explanation.explain(out, profile, tmp_path)


def test_a_forecast_is_of_the_same_job_within_the_same_limits():
    free = forecast(record(), LAPTOP)
    assert free.metrics["total_s"] * free.throughput_tok_s == pytest.approx(80)
    assert free.metrics["passes"] == 20  # two blocks of four: a pass over prompts and nine over one token each
    slow = forecast(record(api.OffloadPolicy(4, schedule="row", weights=(0, 0, 1)),
                           api.HardwareLimits(disk_bandwidth=10_000_000)), LAPTOP)  # fmt: skip
    assert slow.metrics["task_waiting_s"] > 100
    fewer = forecast(record(limits=api.HardwareLimits(threads=1)), LAPTOP)
    assert fewer.throughput_tok_s <= free.throughput_tok_s


def test_the_disk_of_a_forecast_is_as_fast_as_it_was_before_and_after_the_launch():
    policy = api.OffloadPolicy(4, schedule="row", weights=(0, 0, 1))
    rates = [api.MachineRates(disk_read=(rate,)) for rate in (10e6, 30e6)]
    waits = {
        name: forecast(record(policy, machine=before, machine_after=after), LAPTOP).metrics["task_load_weights_s"]
        for name, before, after in (("both", *rates), ("before", rates[0], None))
    }
    assert waits["both"] == pytest.approx(waits["before"] / 2)


def test_another_dtype_than_the_profiles_needs_rates_from_beside_the_launch():
    launch = record()
    launch = replace(launch, load=replace(launch.load, compute_dtype="bfloat16"))
    assert forecast(launch, LAPTOP) is None
    rates = {rows: (3 * rate,) for rows, rate in LAPTOP.host.flops.items()}
    faster = forecast(replace(launch, machine=api.MachineRates(gemm_flops={"bfloat16": rates})), LAPTOP)
    assert faster.throughput_tok_s > forecast(record(), LAPTOP).throughput_tok_s


@pytest.mark.parametrize("figures", [{}, {"total_s": 1.0, "generation_throughput_tok_s": 0.0}])
def test_records_without_figures_are_left_out(tmp_path, figures):
    broken = replace(record(), metrics=figures, repeat=1)
    (one,) = explanation.explain(write(tmp_path, [record(), broken]), "laptop_cpu", tmp_path)
    assert one.repeat == 0


def test_threads_that_a_launch_may_not_use_are_missing_once():
    """On a laptop of which fewer threads were measured, and the product that is measured beside launches too."""
    host = replace(LAPTOP.host, by_threads={"1": 1e11, "8": 8e11}, probed={"512": 2e11, "2048": 4e11})
    known = replace(LAPTOP, host=host)
    hindered = record(limits=api.HardwareLimits(threads=1))
    slow, fast = forecast(hindered, known).throughput_tok_s, forecast(record(), known).throughput_tok_s
    assert fast / 8.5 < slow < fast / 2
    # the rates beside the launch are of its one thread: as measured, they say what the profile says
    hidden = shape(MODEL).hidden
    probed = interpolate({"512": 2e11, "2048": 4e11}, hidden) / 8
    rates = api.MachineRates(gemm_shape=(hidden, 4 * hidden), gemm_flops={"float32": {"256": (probed,)}})
    beside = forecast(replace(hindered, machine=rates), known).throughput_tok_s
    assert beside == pytest.approx(slow, rel=0.01)


def test_memory_is_taken_for_the_lengths_that_were_reserved():
    spec = record().spec
    limits = api.HardwareLimits(host_memory=350 << 20)
    longer = replace(spec, workload=api.WorkloadSpec("synthetic", 1500, 500), limits=limits)
    short = forecast(record(policy=api.OffloadPolicy(4, schedule="sweep"), limits=limits), LAPTOP)
    held = replace(record(), spec=replace(longer, policy=api.OffloadPolicy(4, schedule="sweep")))
    assert forecast(held, LAPTOP).metrics["task_load_weights_s"] > short.metrics["task_load_weights_s"]
