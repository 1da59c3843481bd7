"""Throughput, latency and the bound: small cases by hand and invariants by property."""

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import api
from harness.common.intervals import union_length
from harness.common.percentile import percentile
from harness.common.roofline import bounds_of, job_roofline, rate_at, roofline
from harness.probes.latency import metrics
from reports.rates import with_rates_around
from reports.records import load_records
from reports.summary import throughput
from tests.records import SMALL, SMALL_MODEL, rates, record


def trace(name, start, times, prompt=4, padding=0):
    return api.RequestTrace(name, prompt, len(times), padding, start, tuple(times), "length", "")


def test_one_block_by_hand():
    # two requests share a block: prefill 0..2 s, then decode steps at 3 and 4 s
    found = metrics([trace("a", 0.0, (2.0, 3.0, 4.0)), trace("b", 0.0, (2.0, 3.0, 4.0))], phased=True)
    assert found["generation_throughput_tok_s"] == pytest.approx(6 / 4)
    assert found["total_throughput_tok_s"] == pytest.approx(14 / 4)
    assert found["prefill_s"] == 2.0
    assert found["decode_throughput_tok_s"] == pytest.approx(4 / 2)
    assert found["ttft_p50_s"] == 2.0
    assert found["tpot_p50_s"] == 1.0


def test_a_second_block_counts_its_own_prefill():
    found = metrics([trace("a", 0.0, (2.0, 3.0)), trace("b", 3.0, (5.0, 6.0))], phased=True)
    assert found["prefill_s"] == 4.0
    assert found["decode_s"] == 2.0


def test_padding_counts_only_in_the_padded_throughput():
    plain = metrics([trace("a", 0.0, (1.0, 2.0))], phased=True)
    padded = metrics([trace("a", 0.0, (1.0, 2.0), padding=10)], phased=True)
    assert padded["generation_throughput_tok_s"] == plain["generation_throughput_tok_s"]
    assert padded["padded_throughput_tok_s"] == pytest.approx(16 / 2)


def test_no_decode_figures_where_nothing_was_decoded_or_phases_mix():
    assert metrics([trace("a", 0.0, (1.0,))], phased=True)["decode_throughput_tok_s"] is None
    assert metrics([trace("a", 0.0, (1.0,))], phased=True)["tpot_p50_s"] is None
    assert metrics([trace("a", 0.0, (1.0, 2.0))], phased=False)["decode_throughput_tok_s"] is None


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=20))
def test_union_length_counts_each_moment_once(pairs):
    intervals = [(a, a + d) for a, d in pairs]
    covered = {moment for a, b in intervals for moment in range(a, b)}
    assert union_length(intervals) == len(covered)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentile_lies_between_neighbours(values, q):
    ordered = sorted(values)
    position = (len(ordered) - 1) * q / 100
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    assert low - 1e-6 <= percentile(values, q) <= high + 1e-6


EXACT = api.OffloadPolicy(weight_format="plain")
SHORT, TEN = (api.WorkloadSpec(prompt_len=8, gen_len=tokens) for tokens in (2, 10))


def bound(workload, batch, budget, machine, dtype="float32", model=SMALL_MODEL, policy=EXACT, disk=None):
    limits = api.HardwareLimits(host_memory=budget, disk_bandwidth=disk)
    return roofline(model, api.RunSpec("e", api.ModelSpec("m"), workload, policy, limits=limits), batch, dtype, machine)


#: Bytes of SMALL's matrices: two layers, and the head, whose table is also looked up.
MATRICES = 2 * (2 * 49152 + 64 * 1000)


def test_a_slow_disk_bounds_by_the_bytes_that_do_not_fit():
    found = bound(TEN, 4, 100_000, rates(flops=1e15))
    cache = 4 * (8 + 5) * 9 / 10 * SMALL.kv_bytes_per_token(2)  # its mean: in the first of ten passes none is needed
    disk_s = 10 * (MATRICES - 100_000 + cache) / 1e6
    assert found.limited_by == "disk"
    assert found.disk_s == pytest.approx(disk_s)
    assert found.throughput_tok_s == pytest.approx(40 / disk_s)
    packed = replace(EXACT, weight_bits=4, kv_bits=8, group_size=64)
    found = bound(TEN, 4, 100_000, rates(flops=1e15), policy=packed)
    weights = MATRICES - 100_000 - 2 * 49152 * (16 - 4.5) / 8  # two layers, and a pair of float16 for every 64 values
    assert found.disk_s == pytest.approx(10 * (weights + cache * 8.5 / 16) / 1e6)
    throttled = bound(TEN, 4, 100_000, rates(flops=1e15), disk=500_000)
    assert throttled.disk_s == pytest.approx(2 * disk_s)


def test_bfloat16_needs_no_more_than_twelve_bits_unless_it_is_to_be_plain():
    """The disk reads, and the link carries, a quarter less; float16 has no such form."""
    cache = 4 * (8 + 5) * 9 / 10 * SMALL.kv_bytes_per_token(2)
    for policy, dtype, part in ((EXACT, "bfloat16", 1), (api.OffloadPolicy(), "bfloat16", 0.75),
                                (api.OffloadPolicy(), "float16", 1)):  # fmt: skip
        model = replace(SMALL_MODEL, dtype=dtype)
        found = bound(TEN, 4, 100_000, rates(flops=1e15), policy=policy, model=model)
        assert found.disk_s == pytest.approx(10 * (part * MATRICES - 100_000 + cache) / 1e6), (policy, dtype)
    packed = bound(TEN, 4, 100_000, rates(flops=1e15), policy=api.OffloadPolicy(weight_bits=4))
    weights = 2 * 49152 * 4.5 / 8 + 64 * 1000 * 1.5  # the head keeps its values
    assert packed.disk_s == pytest.approx(10 * (weights - 100_000 + cache) / 1e6)


def test_ranks_have_limits_and_rates_of_their_own():
    of_two = bound(TEN, 4, 60_000, rates(1e9), policy=replace(EXACT, pipeline=2), disk=500_000)
    twice = bound(TEN, 4, 120_000, rates(2e9), disk=1_000_000)
    assert of_two == replace(twice, compute_s=of_two.compute_s) and of_two.limited_by == "disk"
    assert of_two.compute_s == pytest.approx(twice.compute_s)
    assert bound(TEN, 4, 10**9, rates(1e9), policy=replace(EXACT, tensor=4)).disk_s == 0


def test_experts_that_nobody_asks_for_need_not_be_read():
    mixture = replace(SMALL, params_idle=50_000, params_total=SMALL.params_total + 50_000)
    model = replace(SMALL_MODEL, shape=mixture, weight_bytes=SMALL_MODEL.weight_bytes + 100_000)
    assert bound(TEN, 4, 100_000, rates(flops=1e15), model=model) == bound(TEN, 4, 100_000, rates(flops=1e15))


def test_tables_that_are_only_looked_up_need_not_be_read():
    tables = replace(SMALL, params_total=SMALL.params_total + 70_000)
    model = replace(SMALL_MODEL, shape=tables, weight_bytes=SMALL_MODEL.weight_bytes + 140_000)
    assert bound(TEN, 4, 100_000, rates(flops=1e15), model=model) == bound(TEN, 4, 100_000, rates(flops=1e15))
    narrow = replace(SMALL, params_total=SMALL.params_total - 32_000)  # as opt-350m's embeddings, half as wide
    assert narrow.head_params == 32_000


def test_a_fast_disk_bounds_by_arithmetic():
    found = bound(SHORT, 4, 100_000, rates(flops=1e9, disk=1e15))
    by_hand = SMALL.flops(32, 4, 4) / 1e9 + SMALL.flops(4, 9, 4) / 1e9
    assert found.limited_by == "compute"
    assert found.compute_s == pytest.approx(by_hand)


def test_where_many_rows_are_far_faster_a_block_in_step_is():
    machine = replace(rates(), gemm_flops={"float32": {"1": (1e9,), "16": (1e9,), "32": (1e12,)}})
    prefill, decode = SMALL.block_flops(4, 8, 2)
    halves = 2  # bytes of a weight, of which the probe's had four: few rows wait for them half as long
    assert bound(SHORT, 4, None, machine).compute_s == pytest.approx(prefill / 1e12 + decode / (1e9 * halves))


def test_where_rows_of_a_mixed_pass_are_far_faster_sequences_of_mixed_ages_are():
    """Four sequences of 8 + 2 tokens: 18 rows in each of two passes, not 32 and then 4."""
    machine = replace(rates(), gemm_flops={"float32": {"4": (1e9,), "18": (4e9, 3e9), "32": (1e9,)}})
    assert bound(SHORT, 4, None, machine).compute_s == pytest.approx(sum(SMALL.block_flops(4, 8, 2)) / 4e9)


def test_a_batch_of_more_than_all_requests_is_bounded_as_all_of_them():
    few = api.WorkloadSpec(prompt_len=8, gen_len=2, num_requests=3)
    assert bound(few, 64, None, rates()) == bound(few, 3, None, rates())


def test_no_disk_term_without_a_limit_and_no_bound_without_rates():
    assert bound(SHORT, 1, None, rates()).disk_s == 0
    assert bound(SHORT, 1, None, rates(), "bfloat16") is None
    assert bound(SHORT, 1, 1, api.MachineRates((), None, rates().gemm_flops)) is None


@given(st.integers(1, 64), st.integers(1, 64), st.floats(1e5, 1e9), st.floats(1e5, 1e9))
def test_the_bound_never_falls_with_a_faster_machine_or_more_memory(batch, gen, disk, budget):
    workload = api.WorkloadSpec(prompt_len=16, gen_len=gen)
    slow = bound(workload, batch, int(budget), rates(1e9, disk))
    fast = bound(workload, batch, int(budget) * 2, rates(2e9, 2 * disk))
    assert fast.throughput_tok_s >= slow.throughput_tok_s * (1 - 1e-9)


def test_rates_between_measured_rows():
    curve = {"4": (10.0,), "16": (40.0,)}
    assert rate_at(curve, 4) == 10
    assert rate_at(curve, 8) == pytest.approx(20)  # log-log linear
    assert rate_at(curve, 100) == 40
    assert rate_at(curve, 2) == 5  # bound by reading the weights
    assert rate_at(curve, 2, 4.0) == 20  # of which there are fewer
    assert rate_at(curve, 8, 4.0) == 40  # and no faster than the fastest
    assert rate_at(curve, 100, 4.0) == 40
    assert rate_at(curve, 2, 0.5) == 5
    assert rate_at({"16": (7.0, 40.0), "4": (10.0,), "8": ()}, 2) == 5  # of the fewest rows that have a sample


def test_a_device_is_bounded_by_what_its_memory_cannot_hold_of_the_weights():
    """They cross the link in every pass; keys and values may be attended to where they are."""
    limits = api.HardwareLimits(device_memory=100_000, host_memory=10**9)
    spec = api.RunSpec("e", api.ModelSpec("m"), TEN, EXACT, limits=limits)
    machine = replace(rates(flops=1e15), h2d=(1e6, 9e5))
    found = roofline(SMALL_MODEL, spec, 4, "float32", machine)
    assert found.limited_by == "link"
    assert found.link_s == pytest.approx(10 * (MATRICES - 100_000) / 1e6)
    assert found.throughput_tok_s == pytest.approx(40 / found.link_s)
    slow = roofline(SMALL_MODEL, spec, 4, "float32", replace(rates(flops=1e6), h2d=(1e9,)))
    assert slow.limited_by == "compute"
    whole = replace(spec, limits=replace(limits, device_memory=MATRICES))
    assert roofline(SMALL_MODEL, whole, 4, "float32", machine).link_s == 0
    assert roofline(SMALL_MODEL, spec, 4, "float32", rates()) is None, "its rates are another processor's"
    assert bound(TEN, 4, None, machine) is None


LOAD = api.LoadReport(1000, 2048, 4, api.OffloadPolicy(), "float32", (0, 0, 0))
SPEC = api.RunSpec("e", api.ModelSpec("m"), TEN, limits=api.HardwareLimits(host_memory=100_000))


def bound_on(machine):
    return roofline(SMALL_MODEL, SPEC, 4, "float32", machine)


def launch(repeat, machine, host="a", start="10:00:00", wall_s=60.0):
    return record(
        SPEC, repeat, load=LOAD, machine=machine, model=SMALL_MODEL, bound=bound_on(machine), requests=(), metrics={},
        provenance={"machine": {"cpu": host}}, started_at=f"2026-01-01T{start}+00:00", wall_s=wall_s,
    )  # fmt: skip


def bounds(*records):
    return [r.bound.throughput_tok_s for r in with_rates_around(records)]


def test_a_launch_is_held_to_the_best_of_the_probes_before_and_after_it():
    launches = [launch(0, rates(1e9, 2e6)), launch(1, rates(3e9, 1e6), start="10:01:30")]
    expected = [bound_on(rates(3e9, 2e6)), launches[1].bound]
    assert bounds(*launches) == pytest.approx([b.throughput_tok_s for b in expected])
    assert bounds(*reversed(launches)) == pytest.approx([b.throughput_tok_s for b in reversed(expected)])
    own = replace(launches[0], machine_after=rates(1e9, 5e6))
    assert bounds(own, launches[1])[0] == pytest.approx(bound_on(rates(1e9, 5e6)).throughput_tok_s)


def test_a_probe_of_another_machine_says_nothing():
    alone = launch(0, rates(1e9, 1e6))
    other = launch(1, rates(9e9, 9e6), host="fast", start="10:01:30")
    assert bounds(alone, other)[0] == alone.bound.throughput_tok_s


def test_a_launch_that_read_faster_than_its_probes_shows_what_the_disk_can():
    samples = (
        api.Measurement("read_bytes", "bytes", (8e6,), "generate"),
        api.Measurement("wall_s", "s", (2.0,), "generate"),
    )
    fast = replace(launch(0, rates(1e15, 1e6)), measurements=samples)
    assert bounds(fast) == [bound_on(rates(1e15, 4e6)).throughput_tok_s]


@given(st.integers(1, 80), st.integers(1, 64), st.floats(1e5, 1e9), st.floats(2e5, 1e7))
def test_no_batch_is_bounded_above_the_job(batch, gen, disk, budget):
    """The best of a batch that the search skips is within a step of the best that it tries."""
    limits = api.HardwareLimits(host_memory=int(budget))
    spec = api.RunSpec("e", api.ModelSpec("m"), api.WorkloadSpec(prompt_len=16, gen_len=gen), limits=limits)
    job = job_roofline(SMALL_MODEL, spec, 80, "float32", rates(1e9, disk))
    own = roofline(SMALL_MODEL, spec, batch, "float32", rates(1e9, disk))
    assert own.throughput_tok_s <= job.throughput_tok_s * 1.02


@pytest.mark.parametrize(
    ("curve", "best"), [({"1": 1e9, "3": 3e9}, 3), ({"1": 9e9, "2": 1e9}, 1), ({"1": 1e9, "2": 9e9, "3": 1e9}, 2)]
)
def test_the_job_s_bound_is_that_of_its_best_batch(curve, best):
    machine = replace(rates(), gemm_flops={"float32": {rows: (rate,) for rows, rate in curve.items()}})
    spec = replace(SPEC, workload=api.WorkloadSpec(prompt_len=1, gen_len=10), limits=api.HardwareLimits())
    found = job_roofline(SMALL_MODEL, spec, 3, "float32", machine)
    assert found == roofline(SMALL_MODEL, spec, best, "float32", machine)
    assert all(
        found.throughput_tok_s >= roofline(SMALL_MODEL, spec, n, "float32", machine).throughput_tok_s for n in (1, 2, 3)
    )


def test_a_task_has_no_bounds():
    task = replace(SPEC, workload=api.WorkloadSpec("task", task="t"))
    assert bounds_of(replace(launch(0, rates()), spec=task), rates()) == (None, None)


def test_cells_of_one_workload_have_the_bound_of_one_job():
    """Of the requests of the largest: a cell of few requests is not held to less."""
    few, many = (
        replace(launch(i, rates(1e15, 1e6)), fingerprint=str(i), requests=tuple(
            api.RequestTrace(f"r{j}", 8, 10, 0, 0.0, (1.0,) * 10, "length", "") for j in range(count)
        ))
        for i, count in enumerate((4, 400))
    )  # fmt: skip
    found = with_rates_around([few, many])
    assert found[0].job_bound == found[1].job_bound
    assert found[0].bound == found[1].bound
    assert found[0].job_bound.throughput_tok_s > 2 * found[0].bound.throughput_tok_s


def test_arithmetic_in_int8_bounds_only_what_computed_in_it():
    """Its answers differ, so other cells of the job may not choose it."""
    slow, fast = rates(1e9, 1e15).gemm_flops["float32"], rates(1e12, 1e15).gemm_flops["float32"]
    machine = replace(rates(1e9, 1e15), gemm_flops={"float32": slow, "int8": fast})
    found = api.LoadReport(1000, 2048, 4, SPEC.policy, "float32", (0, 0, 0))
    own, job = bounds_of(replace(launch(0, machine), load=found), machine)
    fast_own, fast_job = bounds_of(replace(launch(0, machine), load=replace(found, compute_dtype="int8")), machine)
    without = replace(machine, gemm_flops={"float32": slow})
    assert (own, job) == bounds_of(replace(launch(0, without), load=found), without)
    assert fast_own.throughput_tok_s > 100 * own.throughput_tok_s
    assert fast_job.throughput_tok_s > 100 * job.throughput_tok_s


def test_a_batch_in_bfloat16_is_bounded_by_the_faster_of_bfloat16_and_float32():
    """What has no units for bfloat16 may multiply in float32; what computes in float32 gave no digits up for speed."""
    slow, fast = rates(1e9, 1e15).gemm_flops["float32"], rates(1e12, 1e15).gemm_flops["float32"]

    def own(dtype, **curves):
        found = api.LoadReport(1000, 2048, 4, SPEC.policy, dtype, (0, 0, 0))
        machine = replace(rates(1e9, 1e15), gemm_flops=curves)
        return bounds_of(replace(launch(0, machine), load=found), machine)[0]

    assert own("bfloat16", bfloat16=slow, float32=fast) == own("float32", bfloat16=slow, float32=fast)
    assert own("bfloat16", bfloat16=fast, float32=slow).throughput_tok_s > (
        100 * own("float32", bfloat16=fast, float32=slow).throughput_tok_s
    )
    assert own("float16", float32=fast) is None
    assert own("int8", int8=slow, float32=fast) == own("float32", float32=fast)


COMMITTED = sorted((Path(__file__).parents[2] / "docs" / "results").glob("*/records.jsonl"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_no_committed_record_exceeds_its_bound(path):
    """By more than the probes around it differ."""
    for bounded in with_rates_around(load_records([path.parent])):
        speed = throughput(bounded)
        if bounded.bound and bounded.machine and speed:
            curve = bounded.machine.gemm_flops[bounded.load.compute_dtype]
            spread = max(max(samples) / statistics.median(samples) for samples in curve.values() if samples)
            for bound in filter(None, (bounded.bound, bounded.job_bound)):
                assert speed <= bound.throughput_tok_s * spread, bounded.spec.name


def test_records_without_a_probe_stay_as_they_are():
    bare = replace(launch(0, rates(1e9, 1e6)), machine=None, bound=None)
    assert with_rates_around([bare]) == [bare]


def test_a_bound_is_of_the_policy_that_was_found_and_of_the_lengths_that_were_asked_for():
    found = api.LoadReport(1000, 2048, 4, api.OffloadPolicy(weight_bits=4, kv_bits=4), "float32", (0, 0, 0))
    machine = rates(1e15, 1e6)  # the disk is the bound
    chosen = bounds_of(replace(launch(0, machine), load=found), machine)[0]
    assert chosen == roofline(SMALL_MODEL, replace(SPEC, policy=found.policy), 4, "float32", machine)
    assert chosen.throughput_tok_s > 1.5 * bound_on(machine).throughput_tok_s
    traced = replace(SPEC, workload=api.WorkloadSpec("trace", 100, 50, trace="t.csv"))
    requests = tuple(api.RequestTrace(f"r{i}", 8, 10, 0, 0.0, (1.0,) * 10, "length", "") for i in range(4))
    assert bounds_of(replace(launch(0, machine), spec=traced, requests=requests), machine)[0] == bound_on(machine)
