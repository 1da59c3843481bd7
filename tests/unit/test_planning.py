"""Predictions and searches against brute force and what must hold on any machine."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.models.shapes import shape
from engines.offload.memory.layout import matrices_of, model_tiles
from engines.offload.memory.storage import Plain
from engines.planning.closed_form_planner import ClosedFormPlanner, Prediction
from engines.planning.engine_cost_models import engine_cost_model
from engines.planning.host_planner import HostPlanner
from engines.planning.memory import memory_constraints, peak_memory
from engines.planning.planned_job import PlannedJob
from engines.planning.search import SearchSpace, search
from engines.planning.workload import Lengths, by_whole_tensors, pinned_bytes, sublayers
from harness.api import Bits, OffloadPolicy, Schedule
from tests.planning import JOB, OFFLOAD, OPT_30B, OPT_175B, PROFILES, best, faster, machines, planner, policies


@given(machines, policies())
@settings(max_examples=60, deadline=None)
def test_a_faster_part_never_makes_a_policy_slower(machine: str, policy: OffloadPolicy) -> None:
    profile = PROFILES[machine]
    before = planner(profile).predict(policy).throughput_tok_s
    for other in faster(profile):
        after = planner(other).predict(policy).throughput_tok_s
        assert after >= before * (1 - 1e-9)


@given(policies())
@settings(max_examples=60, deadline=None)
def test_overlap_never_costs_and_never_gives_more_than_there_are_resources(policy: OffloadPolicy) -> None:
    apart, together = (
        planner().predict(replace(policy, overlap=overlap)).throughput_tok_s for overlap in (False, True)
    )
    assert apart * (1 - 1e-9) <= together <= 5 * apart


@given(st.sampled_from(["t4_gcp", "a100_40g"]), st.sampled_from([(16, 16), (4, 16), (4, 4)]), st.booleans(),
       st.sampled_from([("row", 4, 1), ("zigzag", 32, 4), ("sweep", 64, 1)]))  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_no_placement_of_a_grid_is_better_than_the_programmes(
    machine: str, bits: tuple[int, int], on_host: bool, how: tuple[Schedule, int, int]
) -> None:
    schedule, batch, batches = how
    kind = OffloadPolicy(batch, batches, schedule, weight_bits=bits[0], kv_bits=bits[1], cpu_attention=on_host)
    plans = planner(PROFILES[machine])
    found = plans.runnable(kind)
    assert found is not None
    most = plans.predict(found).throughput_tok_s
    steps = [(a / 4, b / 4, (4 - a - b) / 4) for a in range(5) for b in range(5 - a)]
    ends = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0)]
    for weights, cache, activations in itertools.product(steps, steps, ends):
        policy = replace(kind, weights=weights, cache=cache, activations=activations)
        prediction = plans.predict(policy)
        if not plans.missing(prediction):
            assert prediction.throughput_tok_s <= most * 1.03  # whole percents are what is realised


@given(policies())
@settings(max_examples=60, deadline=None)
def test_memory_rows_are_linear_and_count_everything_once(policy: OffloadPolicy) -> None:
    model, lengths = shape(OPT_30B), Lengths(512, 32)
    needs = memory_constraints(model, policy, lengths)
    assert policy.weights and policy.cache and policy.activations
    places, one = (policy.weights, policy.cache, policy.activations), needs[0]
    found = peak_memory(needs, *places)
    kinds = zip((one.weights, one.cache, one.activations), places, strict=True)
    assert found.device >= sum(row[0] * place[0] for row, place in kinds)
    total = found.device + found.host + found.disk
    weights = sum(part.params * part.count for part in sublayers(model)) * (2 if policy.weight_bits == 16 else 0.5)
    assert total >= weights


def test_whole_tensors_go_where_their_middles_fall() -> None:
    """As FlexGen's own rounding: of four matrices 20 % is one, of two none; the disk comes first."""
    attention, forward = sublayers(shape(OPT_30B))[:2]
    assert by_whole_tensors(attention, (0.2, 0.8, 0.0)) == pytest.approx((0.25, 0.75, 0.0), abs=1e-3)
    assert by_whole_tensors(forward, (0.2, 0.8, 0.0)) == pytest.approx((0.0, 1.0, 0.0), abs=1e-3)
    assert by_whole_tensors(attention, (0.0, 0.5, 0.5)) == pytest.approx((0.0, 0.5, 0.5), abs=1e-3)


def test_biases_decide_where_matrices_on_the_boundary_go() -> None:
    """The list of FlexGen's tensors, by hand: fc1, its bias, fc2, its bias, and two vectors of the norm."""
    hidden = 7168
    sizes = [4 * hidden**2, 4 * hidden, 4 * hidden**2, hidden, hidden, hidden]
    middle = (sum(sizes[:2]) + sizes[2] / 2) / sum(sizes)
    assert 0.7499 < middle < 0.75
    forward = sublayers(shape(OPT_30B))[1]
    assert by_whole_tensors(forward, (0.25, 0.75, 0.0))[0] < 1e-3  # vectors alone
    assert by_whole_tensors(forward, (0.26, 0.74, 0.0))[0] == pytest.approx(0.5, abs=1e-3)
    assert by_whole_tensors(forward, (0.75, 0.25, 0.0))[1] == pytest.approx(0.5, abs=1e-3)


def test_compressed_weights_cost_each_batch_their_decompression() -> None:
    """And no more: with one small batch a pass of OPT-175B is little longer than the copies of its 98 GB."""
    plans = planner(model=OPT_175B)
    plans.engine = engine_cost_model("flexgen_ref")
    policy = OffloadPolicy(4, 1, "zigzag", (0.0, 1.0, 0.0), (0.0, 1.0, 0.0), (0.0, 1.0, 0.0), 4, 4)
    steps = [plans.predict(replace(policy, num_gpu_batches=n)).decode_s / 31 for n in (1, 2, 3)]
    assert 15 < steps[0] < 40
    assert 5 < steps[1] - steps[0] == pytest.approx(steps[2] - steps[1], rel=0.05)


def test_memory_is_pinned_in_powers_of_two_and_only_where_it_fits() -> None:
    """Of OPT-175B's compressed weights each matrix of 75 MB takes 128 MB; OPT-30B's in 16 bits fit."""
    attention, *_ = sublayers(shape(OPT_175B))
    assert pinned_bytes(attention, OffloadPolicy(weight_bits=4)) == pytest.approx(4 * (2**27 + 2**24), rel=1e-2)
    held: dict[str, Any] = {"weights": (0.0, 1.0, 0.0), "cache": (1.0, 0.0, 0.0), "activations": (1.0, 0.0, 0.0)}
    for model, bits, pinned in ((OPT_30B, 16, True), (OPT_175B, 4, False)):
        plans = planner(model=model)
        plans.engine = engine_cost_model("flexgen_ref")
        used = plans.predict(OffloadPolicy(1, weight_bits=bits, **held)).used
        assert (used["host"] == 0) == pinned


def test_a_feasible_latency_is_not_called_infeasible() -> None:
    """70 % of OPT-30B's compressed weights fit the device; the programme's share, in whole tensors, does not."""
    policy = OffloadPolicy(8, weights=(0.7, 0.3, 0.0), cache=(1.0, 0.0, 0.0), activations=(1.0, 0.0, 0.0),
                           weight_bits=4, kv_bits=4)  # fmt: skip
    plans = ClosedFormPlanner(JOB, PROFILES["t4_gcp"], engine_cost_model("flexgen_ref"))
    prediction = plans.predict(policy)
    assert not plans.missing(prediction)
    assert prediction.block_latency_s < 160
    found = best(plans, SearchSpace(("row", "zigzag"), [(4, 4)], latency_s=160)).prediction
    assert found.throughput_tok_s >= prediction.throughput_tok_s


@given(st.sampled_from(["flexgen_ref", "lm_offload"]), st.sampled_from(["6.7b", "30b", "66b"]),
       st.sampled_from([(16, 16), (4, 4)]), st.sampled_from([1, 4, 16]), st.floats(1.0, 1.5))  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_a_search_never_gives_up_on_what_is_feasible(
    engine: str, size: str, bits: tuple[Bits, Bits], batch: int, slack: float
) -> None:
    """Whatever policy of a grid fits the memory and a latency limit, the search finds one at least about as fast."""
    job = PlannedJob(shape(f"facebook/opt-{size}"), [Lengths(512, 32)])
    plans = ClosedFormPlanner(job, PROFILES["t4_gcp"], engine_cost_model(engine))
    shares = [(a / 10, (10 - a - b) / 10, b / 10) for a in range(0, 11, 2) for b in range(0, 11 - a, 5)]
    ends = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]
    fitting = []
    for weights, cache, activations in itertools.product(shares, ends, ends[:2]):
        policy = OffloadPolicy(batch, 1, "row", weights, cache, activations, *bits)
        prediction = plans.predict(policy)
        if not plans.missing(prediction):
            fitting.append(prediction)
    soonest = min(fitting, key=lambda p: p.block_latency_s, default=None)
    if soonest is not None:
        space = SearchSpace(("row",), [bits], (False,), latency_s=slack * soonest.block_latency_s)
        assert best(plans, space).prediction.throughput_tok_s >= 0.97 * soonest.throughput_tok_s


def test_the_sweep_of_opt_175b_is_limited_by_arithmetic() -> None:
    found = best(planner(model=OPT_175B), SearchSpace(schedules=("sweep",), bits=((4, 4),)))
    assert found.prediction.bottleneck == "device"
    assert 2.5 < found.prediction.throughput_tok_s < 4.2


def test_a_block_has_no_room_for_more_than_the_job() -> None:
    job = PlannedJob(shape("facebook/opt-1.3b"), [Lengths(64, 8)], 33, budget=1.5e9)
    plans = HostPlanner(job, PROFILES["laptop_cpu"])
    for schedule in ("row", "zigzag", "sweep"):
        found = best(plans, SearchSpace([schedule], cpu_attention=(False,), requests=33))
        assert found.policy.block_size < 33 + found.policy.num_gpu_batches


def test_what_a_job_asks_of_the_memory_planner() -> None:
    model, stored = shape("facebook/opt-1.3b"), Plain("float16")
    tiles = model_tiles(matrices_of(model), stored, stored)
    job = PlannedJob(model, [Lengths(64, 8), Lengths(32, 16)])
    asked = job.memory_request(tiles, stored, "float32", cast_bytes=4, margin_bytes=10)
    assert (asked.max_sequence, asked.mean_sequence) == (72, 54)
    assert asked.compute_bytes == 4
    assert asked.cast_bytes == 4 * max(math.prod(tile.shape) for tile in tiles)
    assert asked.small_bytes == 16 * 2048 * 24 * 4 + 10  # norms and biases of 24 layers, and the margin
    assert replace(job, reserved=100).max_sequence == 100


def test_a_latency_is_kept() -> None:
    last = 0.0
    for latency in (200, 500, 1500):
        found = best(planner(), SearchSpace(latency_s=latency)).prediction
        assert found.block_latency_s <= latency
        assert found.throughput_tok_s >= last
        last = found.throughput_tok_s


class LatePlanner(ClosedFormPlanner):
    """Predicts that every block ends later than estimated."""

    def predict(self, policy: OffloadPolicy) -> Prediction:
        return replace(super().predict(policy), block_latency_s=1e9)


def test_the_best_of_those_that_are_only_estimated_is_not_rejected_too() -> None:
    found = search(LatePlanner(JOB, PROFILES["t4_gcp"], OFFLOAD), SearchSpace(("row", "zigzag"), latency_s=2000))
    assert found.best is not None
    assert found.best.policy not in [candidate.policy for _, candidate, _ in found.rejected if candidate]
