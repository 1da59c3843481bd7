"""NanoFlow's model of a pass against its paper: its table, its ratios, and what bounds which model."""

from dataclasses import replace
from typing import Any

import pytest

from engines.models.shapes import shape
from engines.planning import nanoflow, published
from engines.planning.machine import Machine
from engines.planning.nanoflow import Devices, operations, optimal_tok_s, planned_pass, serving_pass
from engines.planning.workload import Lengths, model_weight_bytes
from harness.api import HarnessError, OffloadPolicy
from harness.common.published import published_rows
from tests.planning import OPT_30B, PROFILES


def test_nanoflows_table_and_optimum() -> None:
    devices = Devices(8, 312e12, 2e12, 300e9)
    rows = list(published_rows("nanoflow_a100"))
    found = {o.name: o for o in operations(shape("meta-llama/Llama-2-70b-hf"), Lengths(512, 1024), 2048, devices)}
    assert len(rows) == len(found) == 7
    for row in rows:
        one = found[row["op"]]
        mine = (one.flops / 1e9, one.memory_bytes / 1e9, one.network_bytes / 1e9)
        for value, name in zip(mine, ("compute_gflop", "mem_gb", "net_gb"), strict=True):
            assert value == pytest.approx(float(row[name]), rel=0.10, abs=0.006)
    estimates = list(nanoflow.published())
    assert len(estimates) == 15  # of 21 those that are not 0
    assert max(abs(published.error_of(mine, figure)) for _, figure, mine in estimates) < 0.10
    assert round(optimal_tok_s(devices, 70e9) - 0.5) == 17828


#: NanoFlow's traces by mean lengths, and constant lengths as it also serves.
SERVED = {
    "Splitwise": Lengths(1155, 211), "LMSYS-Chat-1M": Lengths(102, 222), "ShareGPT": Lengths(246, 322),
    "512+512": Lengths(512, 512), "1024+512": Lengths(1024, 512), "512+1024": Lengths(512, 1024),
}  # fmt: skip

A100 = Devices(8, 312e12, 2e12, 300e9, 80e9)


@pytest.mark.parametrize("workload", SERVED)
@pytest.mark.parametrize(
    "model",
    ["meta-llama/Llama-2-70b-hf", "meta-llama/Meta-Llama-3-70B", "Qwen/Qwen2.5-72B", "mistralai/Mixtral-8x7B-v0.1"],
)
def test_models_with_grouped_queries_are_bound_by_arithmetic(model: str, workload: str) -> None:
    """NanoFlow, section 3 and figure 2: serving is compute-bound for most models and workloads."""
    times = serving_pass(shape(model), SERVED[workload], A100)
    assert times.bound_by == "compute"
    assert max(times.ratios.values()) < 1


def test_without_grouped_queries_or_with_a_small_model_and_long_answers_memory_bounds() -> None:
    long_answers, one = SERVED["512+1024"], replace(A100, count=1)
    assert serving_pass(shape("huggyllama/llama-65b"), long_answers, A100).bound_by == "memory"
    assert serving_pass(shape("meta-llama/Meta-Llama-3-8B"), long_answers, one).bound_by == "memory"
    assert serving_pass(shape("meta-llama/Meta-Llama-3-8B"), SERVED["512+512"], one).bound_by == "compute"
    with pytest.raises(HarnessError, match="do not hold"):
        serving_pass(shape("meta-llama/Llama-2-70b-hf"), long_answers, one)


def test_nanoflows_ratios_are_those_of_its_table() -> None:
    """At the dense batch of table 2, which the memory holds: arithmetic and network of all operations."""
    llama, lengths = shape("meta-llama/Llama-2-70b-hf"), SERVED["512+1024"]
    rows = list(published_rows("nanoflow_a100"))
    compute, memory, network = (sum(float(row[f"t_{name}_ms"]) for row in rows) for name in ("compute", "mem", "net"))
    times = serving_pass(llama, lengths, A100)
    assert times.others["memory"] == pytest.approx(0.040)  # 80 GB at 2 TB/s
    assert times.ratios["network"] == pytest.approx(network / compute, rel=0.02)
    # the table's pass has fewer rows than the memory holds, so its weights weigh more against its arithmetic
    assert times.ratios["memory"] < memory / compute < 1


def test_what_is_off_the_device_takes_the_link_the_host_or_the_disk() -> None:
    model, lengths, t4 = shape(OPT_30B), Lengths(512, 32), Machine(PROFILES["t4_gcp"])
    policy = OffloadPolicy(16, 1, "row", (1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0))

    def ratios(**settings: Any) -> dict[str, float]:
        return planned_pass(model, replace(policy, **settings), lengths, t4, None).ratios

    resident = ratios()
    assert resident["pcie"] == resident["disk"] == resident["host"] == 0
    weights = 0.5 * model_weight_bytes(model, policy) / t4.link.h2d
    assert ratios(weights=(0.5, 0.5, 0.0))["pcie"] == pytest.approx(
        weights / planned_pass(model, policy, lengths, t4, None).compute
    )
    assert ratios(weights=(0.5, 0.0, 0.5))["disk"] > ratios(weights=(0.5, 0.5, 0.0))["pcie"]  # the disk is slower
    copied, attended = ratios(cache=(0.0, 1.0, 0.0)), ratios(cache=(0.0, 1.0, 0.0), cpu_attention=True)
    assert copied["pcie"] > 0 == copied["host"]
    assert attended["host"] > 0 == attended["pcie"]
    assert attended["memory"] < copied["memory"] == resident["memory"]
