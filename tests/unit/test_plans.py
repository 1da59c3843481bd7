"""Plans as users ask for them: what they say, what is refused, stages and threads."""

from dataclasses import replace

import pytest

from engines.models.shapes import CATALOGUE, shape
from engines.offload.memory.layout import matrices_of
from engines.planning.engine_cost_models import engine_cost_model
from engines.planning.host_planner import HostPlanner
from engines.planning.memory import capacity
from engines.planning.plan import flat, nested, plan
from engines.planning.planned_job import PlannedJob
from engines.planning.planners import planner_for
from engines.planning.thread_control import policy_threads
from engines.planning.threads import on_threads
from engines.planning.workload import Lengths, sublayers
from harness.api import HardwareProfile, HarnessError, InfeasibleError, ModelDescription, OffloadPolicy
from tests.planning import JOB, OFFLOAD, OPT_30B, OPT_175B, PROFILES, made


def test_an_engine_refuses_bits_that_it_lacks() -> None:
    with pytest.raises(HarnessError, match="accelerate has no 4-bit weights with a 4-bit cache"):
        plan(ModelDescription(OPT_30B, shape(OPT_30B)), 512, 32, PROFILES["t4_gcp"], "accelerate",
             schedules=("row",), bits=[(4, 4)], latency_s=None, policy=None, stages=None)  # fmt: skip


def test_a_plan_is_a_policy_that_predicts_the_same_when_given_back() -> None:
    first = made()
    policy = OffloadPolicy(**{
        key: tuple(value) if isinstance(value, list) else value
        for key, value in nested(first["policy"]).items()
    })  # fmt: skip
    again = made(policy=policy)
    assert again["predicted"] == first["predicted"]
    assert again["policy"] == first["policy"] == flat(policy)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt": 2040}, "more than facebook/opt-30b takes, 2048"),
        ({"model": "facebook/opt-31b"}, "nearest: facebook/opt-30b"),
        ({"engine": "vllm"}, "no plans are made for engine 'vllm'"),
        ({"machine": "laptop_cpu", "engine": "accelerate"}, "only offload is planned there"),
        ({"generated": 0}, "at least one token"),
        ({"stages": 49}, "has 48 layers: too few for 49 stages"),
        ({"stages": 2, "policy": OffloadPolicy(pipeline=4)}, "--stages 2 with policy.pipeline 4"),
        ({"stages": 2, "policy": OffloadPolicy(schedule="sweep")}, "has batches in step"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(HarnessError, match=words):
        made(**arguments)


def test_what_does_not_fit_says_what_lacks_and_what_would() -> None:
    everything = OffloadPolicy(8, weights=(0.0, 1.0, 0.0), cache=(1.0, 0.0, 0.0), activations=(1.0, 0.0, 0.0))
    with pytest.raises(InfeasibleError, match=r"host memory lacks [\d,]+ bytes; another placement would"):
        made(OPT_175B, policy=everything)
    with pytest.raises(InfeasibleError, match=r"gpu_batch_size \d+ would fit"):
        made("facebook/opt-6.7b", policy=replace(everything, weights=(1.0, 0.0, 0.0), gpu_batch_size=64))
    with pytest.raises(InfeasibleError, match=r"no policy ends a block within 0\.001 s"):
        made(latency=0.001)


@pytest.mark.parametrize("machine", sorted(PROFILES))
@pytest.mark.parametrize("model", ["facebook/opt-125m", "facebook/opt-66b", "meta-llama/Meta-Llama-3-8B"])
def test_a_plan_fits_its_machine(machine: str, model: str) -> None:
    found = made(model, 64, 8, machine)
    peaks, room = found["predicted"]["peak_bytes"], capacity(PROFILES[machine])
    assert all(peaks[tier] <= getattr(room, tier) for tier in ("device", "host", "disk"))
    assert model in CATALOGUE


def test_stages_share_the_layers_and_wait_where_there_are_fewer_groups() -> None:
    one, four = (planner_for(JOB, PROFILES["t4_gcp"], engine_cost_model("flexgen_ref"), stages) for stages in (1, 4))
    held = {"weights": (0.2, 0.8, 0.0), "cache": (0.0, 1.0, 0.0), "activations": (0.0, 1.0, 0.0)}
    idle = []
    for size in (1, 2, 4):
        policy = OffloadPolicy(size, 8, "zigzag", cpu_attention=True, **held)  # weights can be pinned by all
        apart, together = one.predict(policy), four.predict(policy)
        assert together.throughput_tok_s < 4.2 * apart.throughput_tok_s  # the head is the last stage's alone
        assert together.peak.host < 0.3 * apart.peak.host
        assert together.pipeline is not None
        assert together.pipeline.groups == size
        idle.append(together.pipeline.stages[0].idle_share)
    assert idle == sorted(idle, reverse=True)
    assert idle[0] == pytest.approx(3 / 4, abs=0.02)
    assert idle[-1] < 3 / 7  # of the prefill; decoding leaves no stage idle


def test_devices_of_one_host_share_it() -> None:
    found = made("facebook/opt-66b", machine="v100x4")
    assert found["stages"] == 4
    assert found["predicted"]["peak_bytes"]["host"] <= PROFILES["v100x4"].host.memory / 4
    assert found["policy"]["schedule"] != "sweep"


def test_threads_are_left_to_the_streams_and_none_are_idle_for_nothing() -> None:
    laptop = PROFILES["laptop_cpu"]
    assert policy_threads(laptop, OFFLOAD) is None  # nobody has measured fewer threads there

    def measured(cores: int, by_threads: dict[str, float]) -> HardwareProfile:
        return replace(laptop, host=replace(laptop.host, cores=cores, by_threads=by_threads))

    assert policy_threads(measured(4, {"1": 1e11, "4": 4e11}), OFFLOAD) is None
    assert policy_threads(measured(16, {"1": 1e11, "16": 16e11}), OFFLOAD) == 11
    saturated = measured(56, {"1": 1e11, "16": 12e11, "32": 12e11, "56": 9e11})
    assert policy_threads(saturated, OFFLOAD) == 16
    slower = on_threads(saturated.host, 1)
    assert slower.cores == 1
    assert slower.flops["256"] == pytest.approx(saturated.host.flops["256"] / 9)
    model = ModelDescription("facebook/opt-1.3b", shape("facebook/opt-1.3b"))
    found = plan(model, 64, 8, saturated, "offload", schedules=("row",), bits=[(16, 16)],
                 latency_s=None, policy=None, stages=None)  # fmt: skip
    assert found["policy"]["threads"] == 16


def test_experts_are_stored_whole_and_multiplied_in_part() -> None:
    model = shape("mistralai/Mixtral-8x7B-v0.1")
    attention, forward, head = sublayers(model)
    stored = sum(part.params * part.count for part in (attention, forward, head))
    assert stored + model.vocab * model.hidden == pytest.approx(model.params_total, rel=1e-4)
    assert forward.active_share == pytest.approx(0.25, rel=1e-3)
    matrices = matrices_of(model)
    assert sum(m.rows * m.columns for m in matrices) == pytest.approx(stored, rel=1e-4)
    assert {m.expert for m in matrices if m.group == "layer3"} == {None, 0, 1, 2, 3}
    stage = planner_for(PlannedJob(model, [Lengths(512, 32)]), PROFILES["a100_80g_sxm_x8"], OFFLOAD, 8)
    assert stage.job.shape.num_layers == 4
    assert stage.job.shape.forward_stored == pytest.approx(model.forward_stored, rel=1e-6)
    laptop = HostPlanner(PlannedJob(model, [Lengths(64, 8)]), PROFILES["laptop_cpu"])
    found = laptop.predict(OffloadPolicy(16, schedule="sweep", weight_bits=4))
    assert found.used["disk"] > 0
    assert found.used["host"] > 16 * 8 * model.flops(1, 0, 1) / max(PROFILES["laptop_cpu"].host.flops.values())


def test_triples_are_given_whole() -> None:
    with pytest.raises(HarnessError, match="policy has wg without wc, wd"):
        nested({"wg": 1.0})
