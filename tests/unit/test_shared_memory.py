"""Memory shared by what each byte saves: against the linear programme by HiGHS, and what plans by rates do with it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from engines.models import shapes
from engines.offload.memory import placement
from engines.offload.memory.device import plan_device_memory
from engines.offload.memory.expert_usage import ExpertUsage
from engines.offload.memory.host import plan_host_memory
from engines.offload.memory.kv_blocks import kv_block_bytes
from engines.offload.memory.layout import matrices_of, model_tiles
from engines.offload.memory.pass_time import JobPasses, LinkRates, PassRates, Traffic
from engines.offload.memory.placement import PlacementProgram, TierBudgets
from engines.offload.memory.plan import MemoryRequest, WeightClass
from engines.offload.memory.storage import Plain
from engines.planning.engine_cost_models import engine_cost_model
from engines.planning.planned_job import PlannedJob
from engines.planning.planners import planner_for
from engines.planning.workload import Lengths
from harness import api, hardware

GIB, BLOCKS = 1 << 30, 1 << 20
T4 = PassRates(2.7e9, 4 << 20, lambda rows: 2 * rows / 20e12, 300e9, 1.3e9, LinkRates(11.7e9, 11.7e9, 9.5e9))


def programme(weights, cache_bytes, budgets, kinds, held):
    """The least seconds by HiGHS: bytes of each class of weights on each tier, fractions of the cache and of the
    activations, and the seconds of each kind of pass.

    `kinds`: how many passes there are, and of each resource the seconds a byte that is streamed and copied, those of
    the cache by tier, constant ones, and those of activations in host memory and on disk, which free nothing.
    """
    count, classes = len(kinds), len(weights)
    first_c, first_a = 3 * classes, 3 * classes + 3
    size = first_a + 3 + count

    def row(entries):
        found = np.zeros(size)
        for at, value in entries:
            found[at] += value
        return found

    upper, limits = [], []
    for number, (_, lanes) in enumerate(kinds):
        for streamed, copied, tiers, constant, moved in lanes:
            entries = [(first_a + 3 + number, -1.0)]
            for i, one in enumerate(weights):
                entries += [(3 * i + 1, one.probability * copied), (3 * i + 2, one.probability * (copied + streamed))]
            entries += [(first_c + t, tiers[t]) for t in range(3)]
            entries += [(first_a + 1 + t, moved[t]) for t in range(2)]
            upper.append(row(entries))
            limits.append(-constant)
    for tier, available in ((0, budgets.device), (1, budgets.host)):
        upper.append(row([*((3 * i + tier, 1.0) for i in range(classes)), (first_c + tier, cache_bytes)]))
        limits.append(available)
    if budgets.on_disk < math.inf:
        upper.append(row([(first_c + 2, BLOCKS)]))
        limits.append(budgets.on_disk)
    equal = [row([(3 * i + t, 1.0) for t in range(3)]) for i in range(classes)]
    equal += [row([(first + t, 1.0) for t in range(3)]) for first in (first_c, first_a)]
    sums = [*(one.nbytes for one in weights), 1.0, 1.0]
    if held:
        for tier in (0, 1):
            equal.append(row([(3 * i + tier, 1.0) for i in range(classes)]))
            sums.append(held[tier])
    cost = row([(first_a + 3 + n, times) for n, (times, _) in enumerate(kinds)])
    return linprog(cost, np.array(upper), limits, np.array(equal), sums, method="highs")


def cache_lane(rng):
    """A resource's seconds for all of the cache by tier: on disk no fewer than in host memory."""
    device, host, disk = rng.uniform(0, 3, 3) * rng.integers(0, 2, 3)
    return device, host, host + disk


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_memory_is_shared_as_the_linear_programme_does(seed):
    """Of random models, rates and limits: by the finest division, and to a hundredth by that of plans."""
    rng = np.random.default_rng(seed)
    chances = sorted(rng.uniform(0, 1, rng.integers(1, 4)), reverse=True)
    weights = [WeightClass(rng.uniform(0, 2), p) for p in (1.0, *chances)]
    total, cache_bytes = sum(one.nbytes for one in weights), rng.uniform(0.1, 4)
    budgets = TierBudgets(rng.uniform(0, 2) * rng.integers(0, 2), rng.uniform(0, 5))
    if rng.integers(0, 2):
        budgets = replace(budgets, on_disk=float(rng.integers(0, BLOCKS)))
    kinds = [
        (
            float(rng.integers(1, 40)),
            [
                (*(rng.uniform(0, 1, 2) * rng.integers(0, 2, 2)), cache_lane(rng), rng.uniform(0, 1),
                 rng.uniform(0, 1, 2))
                for _ in range(rng.integers(1, 5))
            ],
        )
        for _ in range(rng.integers(1, 3))
    ]  # fmt: skip
    held = None
    if not rng.integers(0, 4):
        on_device = rng.uniform(0, min(budgets.device, total))
        held = on_device, rng.uniform(0, min(budgets.host, total - on_device))

    def job_seconds(traffic: Traffic) -> float:
        return sum(
            times
            * max(
                streamed * traffic.streamed + copied * traffic.copied + np.dot(tiers, traffic.cache) + constant
                for streamed, copied, tiers, constant, _ in lanes
            )
            for times, lanes in kinds
        )

    shared = PlacementProgram(weights, BLOCKS, cache_bytes / BLOCKS, budgets, job_seconds, held)
    solution = programme(weights, cache_bytes, budgets, kinds, held)
    if not shared.fits:
        assert not solution.success
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "_STEPS", 1 << 14)
        finest = shared.best()
    assert solution.success
    assert finest.seconds == pytest.approx(solution.fun, rel=5e-4)
    assert shared.best().seconds <= 1.01 * solution.fun + 1e-9
    assert sum(finest.blocks) == BLOCKS and min(finest.blocks) >= 0


def request(model="facebook/opt-30b", prompt=512, new=32):
    shape, plain = shapes.shape(model), Plain("float16")
    matrices = matrices_of(shape)
    return MemoryRequest(
        shape, model_tiles(matrices, plain, plain, 64 << 20), plain, 2, 0, 50 << 20, (0, 0), prompt + new,
        prompt + new // 2, ExpertUsage.of(matrices, shape), new,
    )  # fmt: skip


def traffic_of(one, plan):
    """What a pass moves under a plan, added up again."""
    blocks = plan.kv_blocks, plan.host_kv_blocks, plan.disk_kv_blocks
    copied, streamed = (
        one.usage.expected_bytes([tile for tile in one.tiles if tile.index not in held], plan.sequences)
        for held in (plan.resident, plan.resident | plan.pinned)
    )
    return Traffic(streamed, copied, tuple(n / sum(blocks) for n in blocks))


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["facebook/opt-30b", "facebook/opt-175b", "mistralai/Mixtral-8x7B-v0.1"]),
    st.sampled_from(["row", "zigzag", "sweep"]), st.integers(1, 300), st.booleans(), st.integers(8, 60),
    st.integers(20, 400),
)  # fmt: skip
def test_a_plan_by_rates_is_as_fast_as_the_order_without_them_or_faster(model, schedule, size, attends, device, host):
    one = request(model)
    policy = api.OffloadPolicy(size, 2 if schedule == "zigzag" else 1, schedule, cpu_attention=attends)
    try:
        plain = plan_device_memory(one, policy, device * GIB, host * GIB)
    except api.InfeasibleError:
        plain = None
    try:
        plan = plan_device_memory(one, policy, device * GIB, host * GIB, T4)
    except api.InfeasibleError:
        assert plain is None
        return
    assert plan.total_bytes <= device * GIB and plan.pinned_bytes <= host * GIB
    passes = JobPasses(one, policy, T4, plan.sequences, plan.chunk, 0)
    told = passes.generated / passes.job_seconds(traffic_of(one, plan))
    assert told == pytest.approx(plan.tokens_per_s, rel=0.05), "but for tiles that do not fit"
    if plain is not None:
        passes = JobPasses(one, policy, T4, plain.sequences, plain.chunk, 0)
        assert told >= 0.95 * passes.generated / passes.job_seconds(traffic_of(one, plain))


def test_what_the_disk_has_no_room_for_stays_in_memory():
    one = request("facebook/opt-175b")
    policy = api.OffloadPolicy(512, schedule="sweep")
    free = plan_device_memory(one, policy, 16 * GIB, 200 * GIB, T4)
    block = kv_block_bytes(one.shape, one.cache)
    assert free.disk_kv_blocks * block > 400 * GIB
    tight = plan_device_memory(one, policy, 16 * GIB, 200 * GIB, T4, 300 * GIB)
    assert 250 * GIB < tight.disk_kv_blocks * block <= 300 * GIB
    none = plan_device_memory(one, policy, 16 * GIB, 200 * GIB, T4, 0)
    assert none.disk_kv_blocks == 0
    assert free.tokens_per_s > tight.tokens_per_s > none.tokens_per_s


@pytest.mark.parametrize("schedule", ["row", "zigzag", "sweep"])
def test_a_host_keeps_a_cache_on_disk_that_it_cannot_hold(schedule):
    """Without rates that is refused for blocks, and for a sweep fewer sequences run."""
    one = request("facebook/opt-1.3b", 128, 64)
    policy = api.OffloadPolicy(64 if schedule == "zigzag" else 128, 2 if schedule == "zigzag" else 1, schedule)
    rates = PassRates(3e9, 4 << 20, lambda rows: 5e-11 + 2 * rows / 50e12, 30e9)
    plan = plan_host_memory(one, policy, 2 * GIB, rates)
    assert plan.disk_kv_blocks > 0 and plan.total_bytes <= 2 * GIB
    if schedule == "sweep":
        assert plan.sequences > plan_host_memory(one, policy, 2 * GIB).sequences
        assert plan_host_memory(one, policy, 2 * GIB, rates, disk=0).disk_kv_blocks == 0
    else:
        with pytest.raises(api.InfeasibleError):
            plan_host_memory(one, policy, 2 * GIB)
        assert plan.sequences == policy.block_size


@pytest.mark.parametrize(
    ("model", "bits", "options", "least", "limit"),
    [
        ("facebook/opt-175b", 16, {}, 0.9, "disk"),
        ("facebook/opt-175b", 4, {"cpu_attention": True, "nano_batches": 2}, 3.3, "device"),
        ("facebook/opt-30b", 16, {"cpu_attention": True, "nano_batches": 2}, 12.6, "host h2d"),
    ],
)
def test_what_the_engine_places_by_itself_on_flexgen_s_machine(model, bits, options, least, limit):
    """A sweep of 512 + 32 tokens with 512 sequences at most; by the closed form."""
    plans = planner_for(PlannedJob(shapes.shape(model), [Lengths(512, 32)]), hardware.load("t4_gcp"),
                        engine_cost_model("offload"), 1)  # fmt: skip
    policy = plans.runnable(api.OffloadPolicy(512, schedule="sweep", weight_bits=bits, kv_bits=bits, **options))
    assert policy is not None
    found = plans.estimate(policy)
    assert found.throughput_tok_s >= least, (found.throughput_tok_s, policy)
    assert found.bottleneck in limit.split(), "of OPT-30B both are busy nearly all the time"
