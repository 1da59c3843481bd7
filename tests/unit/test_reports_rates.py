"""A bound counts what the machine could do before and after a launch."""

from dataclasses import replace

import pytest

from harness.api import (
    HardwareLimits,
    LoadReport,
    MachineRates,
    ModelSpec,
    OffloadPolicy,
    RequestTrace,
    RunSpec,
    WorkloadSpec,
)
from harness.common.roofline import bound_of, roofline
from reports.rates import with_rates_around
from tests.records import SMALL_MODEL, rates, record

LOAD = LoadReport(1000, 2048, 4, OffloadPolicy(), "float32", (0, 0, 0))
SPEC = RunSpec("e", ModelSpec("m"), WorkloadSpec(prompt_len=8, gen_len=10), limits=HardwareLimits(host_memory=100_000))


def bound(machine):
    return roofline(SMALL_MODEL, SPEC, 4, "float32", machine)


def launch(repeat, machine, host="a", start="10:00:00", wall_s=60.0):
    return record(
        SPEC, repeat, load=LOAD, machine=machine, model=SMALL_MODEL, bound=bound(machine), requests=(), metrics={},
        provenance={"machine": {"cpu": host}}, started_at=f"2026-01-01T{start}+00:00", wall_s=wall_s,
    )  # fmt: skip


def bounds(*records):
    return [r.bound.throughput_tok_s for r in with_rates_around(records)]


def test_a_launch_is_held_to_the_mean_of_the_probes_before_and_after_it():
    launches = [launch(0, rates(1e9, 2e6)), launch(1, rates(3e9, 1e6), start="10:01:30")]
    expected = [bound(rates(2e9, 1.5e6)), launches[1].bound]
    assert bounds(*launches) == pytest.approx([b.throughput_tok_s for b in expected])
    assert bounds(*reversed(launches)) == pytest.approx([b.throughput_tok_s for b in reversed(expected)])


def test_of_a_probe_the_best_samples_count():
    noisy = MachineRates((1e6, 3e6), (64, 256), {"float32": {"1": (1e9, 5e8), "1024": (1e9,)}})
    found = bounds(launch(0, noisy), launch(1, rates(1e9, 1e6), start="10:01:30"))
    assert found[0] == pytest.approx(bound(rates(1e9, 2e6)).throughput_tok_s)


def test_a_probe_of_much_later_or_of_another_machine_says_nothing():
    alone = launch(0, rates(1e9, 1e6))
    for changes in ({"host": "fast", "start": "10:01:30"}, {"start": "11:00:00"}):
        other = launch(1, rates(9e9, 9e6), **changes)
        assert bounds(alone, other)[0] == alone.bound.throughput_tok_s


def test_records_without_a_probe_stay_as_they_are():
    bare = replace(launch(0, rates(1e9, 1e6)), machine=None, bound=None)
    assert with_rates_around([bare]) == [bare]


def test_a_bound_is_of_the_policy_that_was_found_and_of_the_lengths_that_were_asked_for():
    found = LoadReport(1000, 2048, 4, OffloadPolicy(weight_bits=4, kv_bits=4), "float32", (0, 0, 0))
    machine = rates(1e15, 1e6)  # the disk is the bound
    chosen = bound_of(replace(launch(0, machine), load=found), machine)
    assert chosen == roofline(SMALL_MODEL, replace(SPEC, policy=found.policy), 4, "float32", machine)
    assert chosen.throughput_tok_s > 1.5 * bound(machine).throughput_tok_s
    traced = replace(SPEC, workload=WorkloadSpec("trace", 100, 50, trace="t.csv"))
    requests = tuple(RequestTrace(f"r{i}", 8, 10, 0, 0.0, (1.0,) * 10, "length", "") for i in range(4))
    assert bound_of(replace(launch(0, machine), spec=traced, requests=requests), machine) == bound(machine)
