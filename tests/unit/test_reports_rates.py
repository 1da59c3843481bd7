"""A bound counts the best samples of all probes of a machine, wherever in the run they were taken."""

from dataclasses import replace

import pytest

from harness.api import (
    HardwareLimits,
    HardwareProfile,
    LoadReport,
    LocalModel,
    ModelShape,
    ModelSpec,
    OffloadPolicy,
    RunRecord,
    RunSpec,
    WorkloadSpec,
    roofline,
)
from reports.rates import with_best_rates

SHAPE = ModelShape("x", 2, 64, 256, 4, 4, 16, 1000, 2048, params_per_layer=49152, params_total=162304)
MODEL = LocalModel("m", SHAPE, weight_bytes=400_000, dtype="bfloat16", digest="d")
LOAD = LoadReport(1000, 2048, 4, OffloadPolicy(), "float32", (0, 0, 0))
SPEC = RunSpec("e", ModelSpec("m"), WorkloadSpec(prompt_len=8, gen_len=10), limits=HardwareLimits(host_memory=100_000))


def probe(disk, flops):
    return HardwareProfile((disk,), (64, 256), {"float32": {"1": (flops,), "1024": (flops,)}})


def bound(machine):
    return roofline(MODEL, SPEC.workload, 4, "float32", 100_000, machine)


def record(repeat, machine, host="a"):
    return RunRecord(
        SPEC, SPEC.fingerprint(), repeat, "ok", load=LOAD, machine=machine, model=MODEL, bound=bound(machine),
        provenance={"machine": {"cpu": host}},
    )  # fmt: skip


def test_every_launch_is_held_to_the_best_minute_of_its_machine():
    fast_disk, fast_cpu = probe(2e6, 1e9), probe(1e6, 2e9)
    best = bound(probe(2e6, 2e9)).throughput_tok_s
    found = with_best_rates([record(0, fast_disk), record(1, fast_cpu)])
    assert [r.bound.throughput_tok_s for r in found] == pytest.approx([best, best])
    assert best >= max(bound(m).throughput_tok_s for m in (fast_disk, fast_cpu))


def test_machines_are_not_mixed():
    alone = record(0, probe(1e6, 1e9), host="slow")
    found = with_best_rates([alone, record(1, probe(9e6, 9e9), host="fast")])
    assert found[0] == alone


def test_records_without_a_probe_stay_as_they_are():
    bare = replace(record(0, probe(1e6, 1e9)), machine=None, bound=None)
    assert with_best_rates([bare]) == [bare]
