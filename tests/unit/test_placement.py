"""The linear programme of placements and the memory that it keeps to, against sums by hand and random placements."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.models.shapes import shape
from engines.planning.closed_form import SublayerCosts, decode_work, mixed_work, prefill_work
from engines.planning.engine_cost_models import engine_cost_model
from engines.planning.machine import Machine
from engines.planning.memory import MemoryConstraint, TierBytes, capacity, memory_constraints, peak_memory
from engines.planning.placement import Programme, linear_programme
from engines.planning.planned_job import PlannedJob
from engines.planning.planners import planner_for
from engines.planning.workload import Lengths
from harness import hardware
from harness.api import OffloadPolicy, Schedule

MODEL, T4 = shape("facebook/opt-30b"), hardware.load("t4_gcp")
DEVICE, HOST, DISK = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)
WHERE = {"device": DEVICE, "host": HOST, "disk": DISK}
#: OPT-30B's sizes, in the letters of FlexGen's appendix.
L, H, HEADS, VOCAB = 48, 7168, 56, 50272
WEIGHTS, LAYER = 2.0 * (12 * H**2 * L + H * VOCAB), 2.0 * 12 * H**2
NO_WEIGHTS = NO_CACHE = (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("schedule", "batches", "lengths"),
    [
        ("row", 1, Lengths(512, 32)),
        ("zigzag", 3, Lengths(512, 32)),
        ("zigzag", 3, Lengths(2, 700)),
        ("sweep", 1, Lengths(512, 32)),
    ],
    ids=str,
)
def test_memory_is_that_of_flexgens_appendix(schedule: Schedule, batches: int, lengths: Lengths) -> None:
    """What stays, two layers in flight, a batch's activations, and attention's scores or the widest intermediate: of
    prompts or of one token after all others."""
    batch, (s, n) = 4, (lengths.prompt, lengths.generated)
    policy = OffloadPolicy(batch, batches, schedule)
    needs, block, sweep = memory_constraints(MODEL, policy, lengths), batch * batches, schedule == "sweep"
    first, held = (1 + s / n, s + n / 2) if sweep else (s, s + n - 1)
    cache = block * held * 2 * 2 * H * L
    rows = 2.0 * H * first
    work = {}
    for new, seen in ((first, s), (1, s + n - 1)):
        scores = batch * (4 * seen * H + 2 * HEADS * new * seen)
        widest = max(8 * new * H * batch, 2 * batch * new * 5 * H)
        work[new] = scores, widest, 2 * new * H * batch
    scores, widest, inputs = (max(each[i] for each in work.values()) for i in range(3))

    def peak(weights: str, cached: str, activations: str) -> TierBytes:
        return peak_memory(needs, WHERE[weights], WHERE[cached], WHERE[activations])

    exactly = pytest.approx
    resident = peak("device", "device", "device")
    assert resident.device == exactly(WEIGHTS + cache + rows * block + max(scores, widest))
    assert (resident.host, resident.disk) == (0.0, 0.0)
    streamed = peak("host", "host", "host")
    assert streamed.device == exactly(2 * LAYER + inputs + widest)
    assert streamed.host == exactly(WEIGHTS + cache + rows * block + LAYER + rows * batch)
    assert streamed.disk == 0
    on_disk = peak("disk", "disk", "disk")
    staged = 2 * cache / L / batches
    assert on_disk.disk == exactly(WEIGHTS + cache + rows * block)
    assert on_disk.host == exactly(LAYER + max(rows * batch, staged))
    assert peak("host", "device", "device").device == exactly(2 * LAYER + cache + rows * block + max(scores, widest))


def test_bytes_that_are_missing_are_those_beyond_what_is_there() -> None:
    there = TierBytes(10.0, 20.0, 30.0)
    assert TierBytes(10.0, 20.5, 29.0).missing(there) == {"host": 0.5}
    assert there.missing(TierBytes(0.0, 0.0, 0.0)) == {"device": 10.0, "host": 20.0, "disk": 30.0}
    assert capacity(T4) == TierBytes(T4.device.memory if T4.device else 0, T4.host.memory, T4.disk.capacity)
    assert capacity(replace(T4, device=None, link=None, devices=0)).device == 0


def length_of(intervals: Any, point: Any) -> float:
    """The total length of all intervals, by hand."""
    total = 0.0
    for lanes, count in intervals:
        slowest = max(sum(a * b for a, b in zip(lane, [*point, 1.0], strict=True)) for lane in lanes)
        total += count * slowest
    return total


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([None, (0.25, 0.5, 0.25)]))
def test_no_placement_takes_less_time_than_the_programmes(seed: int, given_cache: Any) -> None:
    """Of random lanes and memory: among two hundred random placements that fit none is faster; what is given stays."""
    rng = np.random.default_rng(seed)
    programme, intervals, rows = Programme(), [], []
    for _ in range(rng.integers(1, 4)):
        lanes = [rng.uniform(0, 1, 10) * rng.integers(0, 2, 10) for _ in range(rng.integers(1, 4))]
        intervals.append((lanes, float(rng.integers(1, 50))))
        programme.add_interval(*intervals[-1])
    for _ in range(2):
        row = rng.uniform(0, 1, 9)
        need = MemoryConstraint("host", rng.uniform(0, 1), tuple(row[:3]), tuple(row[3:6]), tuple(row[6:]))
        rows.append((need, rng.uniform(1.2, 3.0)))
        programme.add_memory(*rows[-1])
    places = rng.dirichlet([0.5] * 3, (200, 3))
    if given_cache:
        places[:, 1] = given_cache
    fits = [p for p in places.tolist() if all(need.needed(*p) <= available for need, available in rows)]
    flat = np.array([np.ravel(p) for p in fits]).reshape(-1, 9)
    assert programme.seconds(flat) == pytest.approx([length_of(intervals, point) for point in flat])
    found = programme.best(OffloadPolicy(cache=given_cache))
    if found is None:
        assert not fits
        return
    best = found.weights, found.cache, found.activations
    assert all(sum(part or ()) == pytest.approx(1) for part in best)
    assert given_cache is None or found.cache == given_cache
    assert all(need.needed(*best) <= available * (1 + 1e-6) for need, available in rows)
    least = length_of(intervals, np.ravel(best))
    margin = 1 + 9e-5  # what the tiers' order may cost
    assert all(least <= margin * seconds + 1e-6 for seconds in programme.seconds(flat))


@pytest.mark.parametrize(("room", "shares"), [(3.0, (1, 0, 0)), (0.5, (0.5, 0.5, 0)), (0.0, (0, 1, 0))])
def test_of_placements_that_take_as_long_the_upper_tiers_are_taken(room: float, shares: tuple[float, ...]) -> None:
    programme = Programme()
    programme.add_interval([np.array([0.0] * 9 + [2.0])], 3)
    programme.add_memory(MemoryConstraint("device", 1.0, DEVICE, NO_CACHE, NO_CACHE), 1.0 + room)
    found = programme.best(OffloadPolicy())
    assert found is not None
    assert found.weights == pytest.approx(shares, abs=1e-9)
    assert found.cache == found.activations == pytest.approx(DEVICE, abs=1e-9)


def test_what_fits_nowhere_has_no_placement() -> None:
    programme = Programme()
    programme.add_interval([np.ones(10)], 1)
    programme.add_memory(MemoryConstraint("disk", 2.0, NO_WEIGHTS, NO_CACHE, NO_CACHE), 1.9)
    assert programme.best(OffloadPolicy()) is None


SHARES = [(0.2, 0.7, 0.1), (0.5, 0.25, 0.25), DEVICE, DISK]


@pytest.mark.parametrize("schedule", ["zigzag", "sweep"])
@pytest.mark.parametrize(
    "policy", [{"cpu_attention": True}, {"weight_bits": 4, "kv_bits": 4}, {"overlap": False}], ids=str
)
def test_the_programme_counts_the_passes_of_a_block(schedule: Schedule, policy: dict[str, Any]) -> None:
    """The prompts in one, and one for each further token; of a sweep one for each token."""
    lengths, machine, several = Lengths(512, 32), Machine(T4), schedule == "zigzag"
    engine = replace(engine_cost_model("offload"), overlap="pass" if policy.pop("overlap", True) else "none")
    kind = OffloadPolicy(8, 4 if several else 1, schedule, **policy)
    programme = linear_programme(MODEL, kind, lengths, machine, engine, memory_constraints(MODEL, kind, lengths))
    for weights, cache, activations in zip(SHARES, SHARES[1:] + SHARES[:1], reversed(SHARES), strict=True):
        placed = replace(kind, weights=weights, cache=cache, activations=activations)
        cost = SublayerCosts(MODEL, placed, machine, engine).pass_seconds
        decode, _ = cost([decode_work(8, lengths.mean_cached)])
        expected = (
            cost([prefill_work(8, lengths)])[0] + 31 * decode if several else 32 * cost(mixed_work(8, lengths))[0]
        )
        (found,) = programme.seconds(np.array([[*weights, *cache, *activations]]))
        assert found == pytest.approx(expected)
    best = programme.best(kind)
    assert best is not None
    assert best.weights and best.cache and best.activations
    peak = peak_memory(memory_constraints(MODEL, kind, lengths), best.weights, best.cache, best.activations)
    room = capacity(T4)
    assert all(getattr(peak, tier) <= getattr(room, tier) * (1 + 1e-6) for tier in WHERE)


def test_a_pass_of_a_sweep_has_the_rows_of_a_block_s_passes_on_average() -> None:
    lengths, batch = Lengths(512, 32), 64
    decode, prompts = mixed_work(batch, lengths)
    assert lengths.generated * prompts.tokens == prefill_work(batch, lengths).tokens == batch * 512
    assert lengths.generated * prompts.logits_rows == prefill_work(batch, lengths).logits_rows == batch
    assert prompts.context == prefill_work(batch, lengths).context == 256
    assert prompts.prefill and not decode.prefill
    assert (decode.tokens, decode.logits_rows, decode.context) == (batch, batch, 528)


HELD: dict[str, Any] = {"weights": (0.2, 0.8, 0.0), "cache": HOST, "activations": HOST}


@pytest.mark.parametrize("batches", [2, 4, 8])
def test_a_pipeline_s_links_carry_a_row_of_each_token_to_each_further_stage(batches: int) -> None:
    """One group waits for every transfer; those of several overlap, and take no longer than one after the other."""
    job, slow = PlannedJob(MODEL, [Lengths(512, 32)]), 1e6
    token_s = 3 * batches * H * 2 / slow

    def seconds(groups: int, rate: float | None) -> tuple[float, float]:
        planner = planner_for(job, replace(T4, between=rate), engine_cost_model("flexgen_ref"), 4)
        found = planner.predict(OffloadPolicy(groups, batches, "zigzag", **HELD))
        assert found.block_latency_s == pytest.approx(found.prefill_s + found.decode_s)
        assert found.throughput_tok_s == pytest.approx(groups * batches * 32 / found.block_latency_s)
        return found.prefill_s, found.decode_s

    (alone, alone_decode), (linked, linked_decode) = seconds(1, None), seconds(1, slow)
    assert linked - alone == pytest.approx(512 * token_s)
    assert linked_decode - alone_decode == pytest.approx(31 * token_s)
    more = seconds(4, slow)[0] - seconds(4, None)[0]
    assert 512 * token_s < more < 4 * 512 * token_s


def test_stages_on_one_machine_divide_its_host_and_on_their_own_have_all_of_it() -> None:
    job, shared = PlannedJob(MODEL, [Lengths(512, 32)]), hardware.load("v100x4")
    narrow = replace(shared, host=replace(shared.host, bandwidth=shared.link.h2d if shared.link else 0))
    stage, own = (planner_for(job, p, engine_cost_model("flexgen_ref"), 4).profile for p in (narrow, T4))
    for part, names in (("host", ("memory", "bandwidth")), ("disk", ("capacity", "read", "write"))):
        for name in names:
            assert getattr(getattr(stage, part), name) == getattr(getattr(narrow, part), name) / 4
            assert getattr(getattr(own, part), name) == getattr(getattr(T4, part), name)
    assert stage.host.cores == shared.host.cores // 4
    assert stage.host.flops == {rows: rate / 4 for rows, rate in shared.host.flops.items()}
    assert stage.host.attention == {bits: rate / 4 for bits, rate in shared.host.attention.items()}
    assert stage.link is not None
    assert (stage.link.h2d, stage.link.d2h) == (stage.host.bandwidth, stage.host.bandwidth)
    assert own.link == T4.link
