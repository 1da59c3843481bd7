"""Cells of suites on machines that are not here: the same record as a run's, and the search of a measured one."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from engines.models.shapes import shape
from engines.planning.host_planner import HostPlanner
from engines.planning.planned_job import PlannedJob
from engines.planning.search import ALL_BITS
from engines.planning.simulated import search_notes, search_policy, simulate
from engines.planning.workload import Lengths
from harness import hardware, registry
from harness.api import (
    CellResult,
    HardwareLimits,
    LaunchResult,
    LoadReport,
    LocalModel,
    ModelSpec,
    OffloadPolicy,
    RunRecord,
    RunSpec,
    Schedule,
    WorkloadSpec,
)
from harness.run.records import Draft, RecordBuilder

PROFILES = {name: hardware.load(name) for name in ("laptop_cpu", "t4_gcp")}


def simulated(requests: int | str, policy: OffloadPolicy, machine: str, **changes: object) -> RunRecord:
    job = WorkloadSpec("synthetic", 128, 8, requests)
    spec = RunSpec("offload", ModelSpec("facebook/opt-1.3b", "dummy"), job, policy, **changes)
    record = simulate(spec, PROFILES[machine], [], partial(registry.describe_model, cache=Path("unused")))
    assert record.status == "ok", record.reason
    return record


@pytest.mark.parametrize(("machine", "schedule"), [("laptop_cpu", "row"), ("laptop_cpu", "sweep"), ("t4_gcp", "row")])
def test_seconds_of_a_simulated_job_are_of_all_its_requests_and_of_no_more(machine: str, schedule: Schedule) -> None:
    policy = OffloadPolicy(4, schedule=schedule)
    one, three = (simulated(count, policy, machine).metrics for count in (4, 12))
    assert three["generated_tokens"] == 3 * one["generated_tokens"] == 96
    if schedule == "row":
        assert three["total_s"] == pytest.approx(three["prefill_s"] + three["decode_s"], rel=1e-6)
        assert three["decode_throughput_tok_s"] == pytest.approx(one["decode_throughput_tok_s"], rel=0.02)
        assert three["block_latency_s"] == pytest.approx(one["block_latency_s"], rel=0.02)
    for name in ("total_s", "host_busy_s"):
        assert three[name] <= 3.05 * one[name]
        assert three[name] >= 2 * one[name]
    assert three["generation_throughput_tok_s"] == pytest.approx(three["generated_tokens"] / three["total_s"])


def test_an_open_job_is_as_long_as_the_engine_makes_it() -> None:
    found = simulated("auto", OffloadPolicy(4, schedule="sweep"), "laptop_cpu")
    assert found.load.block_size == 4
    assert found.metrics["num_requests"] == 16


def test_a_search_changes_only_what_it_may() -> None:
    own = OffloadPolicy(1, schedule="row", prefill_chunk=64, group_size=32, overlap=False, compute_dtype="bfloat16")
    model = shape("facebook/opt-1.3b")
    spec = RunSpec("offload", ModelSpec("facebook/opt-1.3b", "dummy"), WorkloadSpec("synthetic", 64, 8, 16), own,
                   tune="search", limits=HardwareLimits(host_memory=2 << 30))  # fmt: skip
    local = LocalModel("", model, 2 * model.params_total, "bfloat16", "")
    found = search_policy(spec, local, PROFILES["laptop_cpu"], []).policy
    assert found.gpu_batch_size > 1
    assert replace(found, gpu_batch_size=1) == own


def test_weights_of_32_bits_take_twice_the_room() -> None:
    policy = OffloadPolicy(1, schedule="row")
    model, lengths = shape("facebook/opt-1.3b"), Lengths(64, 8)
    peaks = [HostPlanner(PlannedJob(model, [lengths], dtype=dtype), PROFILES["laptop_cpu"]).predict(policy).peak
             for dtype in ("bfloat16", "float32")]  # fmt: skip
    weights = model.params_per_layer * model.num_layers
    assert peaks[1].host - peaks[0].host > 1.9 * weights


def test_a_search_of_bits_offers_a_cache_of_eight_and_says_what_the_bits_cost() -> None:
    limits = HardwareLimits(host_memory=1 << 30)
    found = simulated(64, OffloadPolicy(schedule="sweep"), "laptop_cpu", tune="search_bits", limits=limits)
    assert found.load.policy.weight_bits < 16
    assert any("accuracy, on SmolLM2" in note for note in found.load.notes)
    given = simulated(64, OffloadPolicy(4, weight_bits=8), "laptop_cpu")
    assert not any("accuracy" in note for note in given.load.notes), "nobody searched these bits"
    assert (16, 8) in ALL_BITS
    assert search_notes("search_bits", OffloadPolicy(kv_bits=8)) == (
        "accuracy, on SmolLM2-135M-Instruct: cache in 8 bits: +0.0 points of LAMBADA (-0.5 to +0.5), "
        "+0.0% perplexity of WikiText-2",
    )
    assert search_notes("search_bits", OffloadPolicy()) == search_notes("search", OffloadPolicy(kv_bits=8)) == ()


def test_the_record_of_a_launch_has_the_notes_of_its_search() -> None:
    cell = RunSpec("offload", ModelSpec("facebook/opt-125m", "dummy"), WorkloadSpec(), name="cell")
    load = LoadReport(8, 8, 1, OffloadPolicy(), "float32", (0, 1, 0), notes=("loaded",))
    draft = Draft(cell, 0, notes=("what bits cost",))
    builder = RecordBuilder("", {})
    builder.collect_provenance()
    launched = LaunchResult("ok", measured=CellResult(load=load))
    assert builder.build(cell, draft, launched).load.notes == ("loaded", "what bits cost")
    assert builder.build(cell, draft, LaunchResult("timeout", "late")).load is None
