"""Pipelines in virtual time: what any of them must keep, what textbooks say of equal stages, and the engine's."""

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.models.shapes import shape
from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.memory.plan import MemoryPlan
from engines.offload.memory.rows import io_compute_balance_rows
from engines.offload.prefill_budget import job_budget, make_scheduler
from engines.planning.host_pipeline import HostPipelinePlanner
from engines.planning.host_planner import HostPlanner, place_model, simulated_sequences
from engines.planning.machine import Machine
from engines.planning.plan import plan
from engines.planning.planned_job import PlannedJob
from engines.planning.simulated import simulate
from engines.planning.simulator import Simulator
from engines.planning.virtual_job import run_job
from engines.planning.virtual_pipeline import StageUse, VirtualLink, Visit, run_pipeline, stage_use
from engines.planning.workload import Lengths
from harness import registry
from harness.api import (
    HardwareLimits,
    ModelDescription,
    ModelSpec,
    OffloadPolicy,
    RankLink,
    RunSpec,
    Schedule,
    WorkloadSpec,
)
from tests.planning import PROFILES

LAPTOP = PROFILES["laptop_cpu"]
OPT = "facebook/opt-1.3b"


@dataclass
class Timed:
    """A stage whose passes take the times that their work says."""

    index: int
    free: float = 0.0

    def run_pass(self, work: list[float], ready: float) -> tuple[float, float]:
        start = max(self.free, ready)
        self.free = start + work[self.index]
        return start, self.free


@dataclass
class Listed:
    """A group whose passes take so long in each stage."""

    passes: list[list[float]]
    ended: list[float] = field(default_factory=list)
    begun: int = 0

    @property
    def next_arrival_s(self) -> float | None:
        return 0.0 if self.begun < len(self.passes) else None

    def begin(self, now: float) -> list[float] | None:
        if self.begun == len(self.passes):
            return None
        self.begun += 1
        return self.passes[self.begun - 1]

    def end(self, work: list[float], now: float) -> None:
        self.ended.append(now)


def visits_of(jobs: list[list[list[float]]], links: list[VirtualLink]) -> list[Visit]:
    return run_pipeline([Timed(k) for k in range(len(links))], links, [Listed(job) for job in jobs], lambda _: 1.0)


def uses(visits: list[Visit], stages: int) -> list[StageUse]:
    end = max(visit.end_s for visit in visits)
    return [stage_use(visits, k, end, {}) for k in range(stages)]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[list[list[float]]], list[tuple[float | None, float]]]:
    """Of each group its passes, each with its seconds in every stage; of each link its rate and delay."""
    stages = draw(st.integers(1, 4))
    seconds = st.lists(st.integers(0, 8).map(float), min_size=stages, max_size=stages)
    jobs = draw(st.lists(st.lists(seconds, min_size=1, max_size=5), min_size=1, max_size=5))
    link = st.tuples(st.sampled_from([None, 0.5, 2.0]), st.sampled_from([0.0, 0.0, 3.0]))
    return jobs, draw(st.lists(link, min_size=stages, max_size=stages))


@given(pipelines())
@settings(max_examples=100, deadline=None)
def test_every_pass_takes_every_stage_in_order_and_nothing_is_busy_twice_at_once(pipeline) -> None:
    jobs, told = pipeline
    stages = len(told)
    visits = visits_of(jobs, [VirtualLink(*link) for link in told])
    end = max(visit.end_s for visit in visits)
    for i, passes in enumerate(jobs):
        mine = [visit for visit in visits if visit.group == i]
        assert [visit.stage for visit in mine] == list(range(stages)) * len(passes)
        assert [visit.end_s - visit.start_s for visit in mine] == [s for each in passes for s in each]
        assert all(after.start_s >= after.arrived_s >= after.sent_s >= before.end_s for before, after in pairwise(mine))
    for k in range(stages):
        mine = [visit for visit in visits if visit.stage == k]
        assert all(after.start_s >= before.end_s for before, after in pairwise(mine))
        sent = [visit.sent_s for visit in mine]
        assert sent == sorted(sent)
        if k and (rate := told[k - 1][0]):  # a link carries a pass after the other, too
            arrived = [visit.arrived_s for visit in mine]
            assert all(b - a >= 1 / rate for a, b in pairwise(arrived))
    work = [sum(each[k] for passes in jobs for each in passes) for k in range(stages)]
    travels = [delay + (1 / rate if rate and k < stages - 1 else 0.0) for k, (rate, delay) in enumerate(told)]
    count = sum(map(len, jobs))
    assert max(work) <= end <= sum(work) + count * sum(travels)
    for use, seconds in zip(uses(visits, stages), work, strict=True):
        assert use.busy_s == seconds
        assert use.total_s == pytest.approx(end)
        assert min(use.fill_s, use.drain_s, use.link_s, use.stage_s) >= 0


@pytest.mark.parametrize(("stages", "groups"), [(1, 3), (2, 1), (3, 5), (4, 4), (4, 7)])
def test_equal_stages_idle_for_the_textbook_s_bubble(stages: int, groups: int) -> None:
    """(S - 1) / (g + S - 1) of a pass of each group: k of them until stage k begins, the rest after it ended. Further
    passes of at least S groups add no bubble."""

    def found(passes: int) -> list[StageUse]:
        links = [VirtualLink() for _ in range(stages)]
        return uses(visits_of([[[2.0] * stages] * passes] * groups, links), stages)

    for k, use in enumerate(found(1)):
        assert use.idle_share == pytest.approx((stages - 1) / (groups + stages - 1))
        assert (use.fill_s, use.drain_s) == (2.0 * k, 2.0 * (stages - 1 - k))
    if groups >= stages:
        assert {use.total_s for use in found(9)} == {2.0 * (9 * groups + stages - 1)}


def test_idle_time_is_told_apart_by_what_is_waited_for() -> None:
    """The second of two stages waits 4 s for the first pass; then 1 s while the next one is in the first stage, and 2 s
    while it travels."""
    visits = visits_of([[[2.0, 3.0]], [[6.0, 1.0]]], [VirtualLink(0.5), VirtualLink()])
    first, second = uses(visits, 2)
    assert (first.busy_s, first.fill_s, first.drain_s, first.link_s, first.stage_s) == (8.0, 0.0, 3.0, 0.0, 0.0)
    assert (second.busy_s, second.fill_s, second.drain_s) == (4.0, 4.0, 0.0)
    assert (second.link_s, second.stage_s) == (2.0, 1.0)


@pytest.mark.parametrize("schedule", ["row", "zigzag", "sweep"])
def test_one_stage_is_the_simulator_alone_to_the_last_bit(schedule: Schedule) -> None:
    lengths = [Lengths(20 + 7 * i, 3 + i % 4) for i in range(9)]
    policy = OffloadPolicy(3, 2 if schedule == "zigzag" else 1, schedule, weights=(0.0, 0.4, 0.6))
    job, machine = PlannedJob(shape(OPT), lengths), Machine(LAPTOP)
    placed = place_model(job, policy, None, 2, machine)
    planned, alone = placed.plan, Simulator(placed, policy, machine)
    sequences, now = simulated_sequences(lengths), 0.0
    manager = BlockManager(planned.kv_blocks)
    balance = io_compute_balance_rows(placed.pass_bytes, LAPTOP.disk.read, machine.flops(256), job.shape)
    work = [(s.tokens, s.steps_left) for s in sequences]
    budget = job_budget(work, manager.num_blocks, policy, planned, balance, planned.chunk)
    scheduler = make_scheduler(sequences, manager, policy, planned, budget, planned.chunk)
    while scheduler.next_arrival_s is not None:
        batches = scheduler.next_pass(now)
        _, now = alone.run_pass(batches, now)
        for chunk in (c for batch in batches for c in batch):
            if chunk.sequence.advance(chunk.count, now) and not chunk.sequence.steps_left:
                scheduler.finish(chunk.sequence)
    stage, again = Simulator(placed, policy, machine), simulated_sequences(lengths)
    visits = run_job([stage], again)
    assert [s.times for s in again] == [s.times for s in sequences]
    assert stage.timeline.trace() == alone.timeline.trace()
    assert visits[-1].end_s == now
    planner = HostPlanner(PlannedJob(shape(OPT), lengths, len(lengths)), LAPTOP)
    one = HostPipelinePlanner(planner.job, LAPTOP, 1).predict(policy)
    assert one.throughput_tok_s == planner.predict(policy).throughput_tok_s


#: A disk slower than a thread of the laptop multiplies, so that reading is what one rank waits for.
SMALL = HardwareLimits(host_memory=900 << 20, disk_bandwidth=50e6, threads=1)


def record(ranks: int):
    """The suite `pipeline` on a slower disk, simulated."""
    policy = OffloadPolicy(24, schedule="row", pipeline=ranks, weights=(0.0, 1.0, 0.0) if ranks == 4 else None)
    model = ModelSpec(OPT, "dummy", dtype="bfloat16")
    spec = RunSpec("offload", model, WorkloadSpec("synthetic", 64, 16, 24), policy, limits=SMALL)
    found = simulate(spec, LAPTOP, [], partial(registry.describe_model, cache=Path("unused")))
    assert found.status == "ok", found.reason
    return found


def test_four_ranks_hold_what_one_reads_and_decode_more_than_four_times_as_fast() -> None:
    one, two, four = (record(ranks) for ranks in (1, 2, 4))
    assert one.metrics["disk_busy_s"] > 0.9 * one.metrics["total_s"]
    assert four.metrics["disk_busy_s"] == 0
    assert "groups under way: 4;" in "".join(four.load.notes)
    assert four.metrics["decode_throughput_tok_s"] > 4 * one.metrics["decode_throughput_tok_s"]
    for ranks, found in ((2, two), (4, four)):
        assert all(0 <= found.metrics[f"rank{rank}_idle_share"] < 1 for rank in range(ranks))
        assert f"rank{ranks}_idle_share" not in found.metrics
        assert sum(note.startswith(f"{ranks} stages, groups under way") for note in found.load.notes) == 1
    assert "groups under way: 1;" in "".join(two.load.notes), "weights stream: read once for everybody"
    assert "limited by the disk" in "".join(two.load.notes)
    assert {event.cat for event in four.trace} >= {f"rank {rank}" for rank in range(4)}


def test_ranks_that_share_cores_are_slower_than_ranks_with_their_own() -> None:
    job = PlannedJob(shape(OPT), [Lengths(16, 4)], 8)
    policy = OffloadPolicy(8, schedule="row", weights=(0.0, 1.0, 0.0), pipeline=2)
    own, shared = (HostPipelinePlanner(job, LAPTOP, 2, at_once).predict(policy) for at_once in (None, 1.0))
    assert own.pipeline is not None and shared.pipeline is not None
    assert own.pipeline.groups == shared.pipeline.groups == 2
    assert shared.throughput_tok_s < 0.75 * own.throughput_tok_s


def test_a_token_takes_the_delay_of_each_link_that_it_passes_and_the_time_of_its_bytes() -> None:
    job = PlannedJob(shape(OPT), [Lengths(16, 9)], 4)
    policy = OffloadPolicy(4, schedule="row", weights=(0.0, 1.0, 0.0), pipeline=2)
    near, far, thin = (
        HostPipelinePlanner(job, LAPTOP, 2, link=link).predict(policy)
        for link in (RankLink(None, 0.0), RankLink(None, 0.5), RankLink(8 * 4 * shape(OPT).hidden * 2, 0.0))
    )
    assert far.decode_s - near.decode_s == pytest.approx(8 * 2 * 0.5, rel=0.05)
    assert thin.decode_s - near.decode_s > 8 * 0.9  # a second for four rows in 16 bits


def test_a_stage_is_placed_as_the_engine_places_it() -> None:
    """Its cache stays in memory, and memory goes to sequences rather than weights where links make each pass long."""

    def memory(lengths: Lengths, mib: int, delay_s: float) -> MemoryPlan:
        job = PlannedJob(shape("facebook/opt-350m"), [lengths], 64, "bfloat16", float(mib << 20))
        planner = HostPipelinePlanner(job, LAPTOP, 2, link=RankLink(None, delay_s))
        [placed, _] = planner.placed_stages(OffloadPolicy(64, schedule="sweep", pipeline=2))
        assert placed.plan.disk_kv_blocks == 0
        return placed.plan

    assert memory(Lengths(512, 128), 260, 0.0).sequences == 3  # 19 with most of the cache on disk
    near, far = (memory(Lengths(64, 32), 340, delay_s) for delay_s in (1e-9, 1.0))
    assert far.sequences > near.sequences


def test_a_plan_names_the_stage_that_takes_longest_and_a_slow_link() -> None:
    """Every stage computes every token; the last one has the head. On a slow link the others wait."""
    policy = OffloadPolicy(8, schedule="sweep", weights=(0.0, 1.0, 0.0))

    def made(rate: float | None, stages: int | None = 3, **changes: object) -> dict:
        return plan(ModelDescription(OPT, shape(OPT)), 32, 8, replace(LAPTOP, between=rate), "offload",
                    schedules=("sweep",), bits=[(16, 16)], latency_s=None, policy=replace(policy, **changes),
                    stages=stages)  # fmt: skip

    free, slow, in_8_bits = made(None), made(1e5), made(1e5, None, pipeline=3, wire_bits=8)
    for found in (free, slow):
        assert found["policy"]["pipeline"] == found["cell"]["policy"]["pipeline"] == found["stages"] == 3
        assert sum(stage["layers"] for stage in found["pipeline"]["stages"]) == 24
    longest = max(free["pipeline"]["stages"], key=lambda stage: stage["busy_s"])
    assert free["pipeline"]["bottleneck"] == {"stage": longest["stage"], "limited_by": "products"}
    assert slow["pipeline"]["bottleneck"]["limited_by"] == slow["predicted"]["bottleneck"] == "network"
    assert all(stage["link_s"] == 0 for stage in free["pipeline"]["stages"])
    assert all(stage["link_s"] > stage["stage_s"] for stage in slow["pipeline"]["stages"][1:])
    assert in_8_bits["predicted"]["throughput_tok_s"] > 1.5 * slow["predicted"]["throughput_tok_s"]
