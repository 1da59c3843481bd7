"""The simulator against the engine that it stands for, and against what no machine can do."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.models.shapes import shape
from engines.offload.memory.storage import storages
from engines.offload.scheduler import ScheduledChunk
from engines.planning.host_planner import HostPlanner, place_model, simulated_sequences
from engines.planning.machine import Machine
from engines.planning.planned_job import PlannedJob
from engines.planning.simulator import PlacedModel, SimulatedSequence, Simulator
from engines.planning.virtual_job import run_job
from engines.planning.workload import Lengths
from harness import hardware
from harness.api import GenerationRequest, HarnessError, LocalModel, OffloadPolicy, SamplingParams, Schedule
from tests.offload import VOCAB, load

LAPTOP = hardware.load("laptop_cpu")


def planner_of(model: str, lengths: Lengths, requests: int | None = None, machine=LAPTOP) -> HostPlanner:
    return HostPlanner(PlannedJob(shape(model), [lengths], requests), machine)


def simulate(
    placed: PlacedModel, policy: OffloadPolicy, lengths: list[Lengths], disk: float = LAPTOP.disk.read
) -> tuple[Simulator, list[SimulatedSequence]]:
    """The laptop's virtual run of the requests, to its end."""
    simulator = Simulator(placed, policy, Machine(replace(LAPTOP, disk=replace(LAPTOP.disk, read=disk))))
    sequences = simulated_sequences(lengths)
    run_job([simulator], sequences)
    return simulator, sequences


@pytest.mark.parametrize(
    "policy",
    [
        {"schedule": "row", "gpu_batch_size": 3, "weights": (0.0, 0.0, 1.0)},
        {"schedule": "zigzag", "gpu_batch_size": 2, "num_gpu_batches": 3, "prefill_chunk": 5},
        {"schedule": "sweep", "gpu_batch_size": 4, "weights": (0.0, 1.0, 0.0)},
        {"schedule": "sweep", "gpu_batch_size": 5, "weights": (0.0, 1.0, 0.0), "prefill_chunk": 7},
        {"schedule": "sweep", "gpu_batch_size": 6, "weights": (0.0, 0.0, 1.0), "nano_batches": 2},
        {
            "schedule": "sweep",
            "gpu_batch_size": 6,
            "weights": (0.0, 0.5, 0.5),
            "nano_batches": "KQV0 O1 UG1 D1 KQV1 O0 UG0 D0 cut=0.4",
        },
        {"schedule": "row", "gpu_batch_size": 4, "cache": (0.0, 0.5, 0.5), "weights": (0.0, 0.0, 1.0)},
        {"schedule": "sweep", "gpu_batch_size": 4, "cache": (0.0, 0.3, 0.7), "overlap": False},
        {"schedule": "zigzag", "gpu_batch_size": 2, "num_gpu_batches": 2, "activations": (0.0, 0.4, 0.6)},
    ],
)
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_passes_and_rows_are_the_engines_own(model: LocalModel, tmp_path: Path, policy: dict[str, object]) -> None:
    lengths = [Lengths(3 + 5 * i % 17, 2 + 3 * i % 9) for i in range(11)]
    engine, _ = load(model, tmp_path, **policy)
    requests = [
        GenerationRequest(f"r{i}", tuple((7 * i + k) % VOCAB for k in range(one.prompt)),
                          SamplingParams(max_tokens=one.generated, ignore_eos=True))
        for i, one in enumerate(lengths)
    ]  # fmt: skip
    assert len(list(engine.generate(requests))) == len(lengths)
    metrics = engine.trace().metrics
    loaded = engine.loaded
    engine.close()  # which waits for the last writes: answers do not
    stats = loaded.stats()
    moved = stats.kv_bytes_read, stats.kv_bytes_written

    found = PlacedModel(model.shape, loaded.tiles, storages(model.dtype, OffloadPolicy(**policy))[2], loaded.plan)
    simulator, sequences = simulate(found, OffloadPolicy(**policy), lengths)
    disk, tasks = LAPTOP.disk, simulator.timeline.tasks
    assert tasks["task_load_cache"] == pytest.approx(moved[0] / disk.read)
    assert tasks["task_store_cache"] == pytest.approx(moved[1] / disk.write)
    assert bool(tasks["task_move_activations"]) == bool(stats.activation_rows_on_disk)
    assert simulator.timeline.passes == metrics["passes"]
    assert simulator.timeline.rows == pytest.approx(metrics["rows_per_pass"] * metrics["passes"])
    assert [len(s.times) for s in sequences] == [one.generated for one in lengths]


@given(
    st.sampled_from(["row", "zigzag", "sweep"]),
    st.integers(1, 24),
    st.sampled_from([16, 8, 4]),
    st.sampled_from([400e6, 2e9]),
    st.sampled_from([4, 16, 20]),
)
@settings(max_examples=25, deadline=None)
def test_virtual_time_keeps_the_bounds_of_arithmetic_and_disk(
    schedule: str, batch: int, bits: int, disk: float, layers_held: int
) -> None:
    model = shape("facebook/opt-125m")
    policy = OffloadPolicy(batch, 2 if schedule == "zigzag" else 1, schedule, weight_bits=bits, kv_bits=bits,
                           weights=(0.0, layers_held / 20, 1 - layers_held / 20))  # fmt: skip
    lengths = [Lengths(32, 8)] * (3 * policy.block_size)
    found = place_model(PlannedJob(model, lengths), policy, None, 2, Machine(LAPTOP))
    simulator, sequences = simulate(found, policy, lengths, disk)
    whole = max(s.times[-1] for s in sequences)
    passes = simulator.timeline.passes
    streamed = sum(b.span for b, on_disk in zip(found.tiles, found.streamed, strict=True) if on_disk)
    assert whole >= (passes - 1) * streamed / disk
    tokens = sum(one.prompt + one.generated - 1 for one in lengths)
    assert simulator.timeline.rows == tokens
    best = max(LAPTOP.host.flops.values())
    assert whole >= model.flops(tokens, 0, 0) / best
    for sequence in sequences:
        assert sequence.times == sorted(sequence.times)
        assert sequence.times[0] > 0


@pytest.mark.parametrize("schedule", ["row", "zigzag", "sweep"])
def test_passes_that_are_alike_may_be_played_once(schedule: Schedule) -> None:
    model, lengths = shape("facebook/opt-1.3b"), [Lengths(64, 4)] * 12
    asked = OffloadPolicy(2, 2, schedule, weights=(0.0, 0.3, 0.7))
    found = place_model(PlannedJob(model, lengths), asked, None, 2, Machine(LAPTOP))

    class Forgetful(dict):
        def __contains__(self, key: object) -> bool:
            return False

    times = []
    for passes in ({}, Forgetful()):
        simulator = Simulator(found, asked, Machine(LAPTOP))
        simulator._passes = passes
        sequences = simulated_sequences(lengths)
        run_job([simulator], sequences)
        times.append([*simulator.timeline.tasks.values(), *(t for s in sequences for t in s.times)])
        played = len(passes)
    assert times[0] == pytest.approx(times[1])
    assert played < simulator.timeline.passes or schedule == "sweep"


def test_what_is_on_disk_of_the_cache_and_the_activations_takes_time_and_room() -> None:
    base = OffloadPolicy(16, schedule="row", weights=(0.0, 1.0, 0.0))
    planner = planner_of("facebook/opt-1.3b", Lengths(256, 8))
    free = planner.predict(base)
    cache = planner.predict(replace(base, cache=(0.0, 0.0, 1.0)))
    activations = planner.predict(replace(base, activations=(0.0, 0.0, 1.0)))
    assert cache.throughput_tok_s < free.throughput_tok_s
    assert cache.peak.disk > 16 * 256 * 2 * 24 * 2048 * 2
    assert cache.peak.host < free.peak.host
    with pytest.raises(HarnessError, match="no performance model"):
        planner.predict(replace(base, value_sparsity=0.1))
    assert activations.throughput_tok_s < free.throughput_tok_s


def test_a_disk_that_is_too_small_is_no_plan() -> None:
    small = replace(LAPTOP, disk=replace(LAPTOP.disk, capacity=1e9))
    planner = planner_of("facebook/opt-30b", Lengths(64, 8), machine=small)
    policy = OffloadPolicy(4, schedule="row", weights=(0.0, 0.1, 0.9))
    assert planner.runnable(policy) is None
    assert planner.missing(planner.predict(policy))["disk"] > 50e9
    with pytest.raises(HarnessError, match="the system alone takes"):
        planner_of("facebook/opt-125m", Lengths(64, 8), machine=replace(LAPTOP, host=replace(LAPTOP.host, memory=1e9)))


def test_more_parts_than_sequences_are_as_many_as_these() -> None:
    policy = OffloadPolicy(4, schedule="sweep", nano_batches=1_000_000_000)
    planner = planner_of("facebook/opt-125m", Lengths(32, 4))
    assert planner.predict(policy).throughput_tok_s > 0


def test_a_block_takes_as_long_beside_others_as_by_itself() -> None:
    policy, lengths = OffloadPolicy(4, schedule="row"), Lengths(256, 4)
    one, three = (planner_of("facebook/opt-125m", lengths, count).predict(policy) for count in (4, 12))
    assert three.block_latency_s == pytest.approx(one.block_latency_s, rel=0.01)
    assert three.prefill_s + three.decode_s == pytest.approx(3 * one.block_latency_s, rel=0.01)


def test_only_overlap_hides_the_disk() -> None:
    model, lengths = shape("facebook/opt-1.3b"), [Lengths(32, 8)] * 16
    times = {}
    for overlap in (True, False):
        policy = OffloadPolicy(16, schedule="row", weights=(0.0, 0.0, 1.0), overlap=overlap)
        placed = place_model(PlannedJob(model, lengths), policy, None, 8, Machine(LAPTOP))
        simulator, sequences = simulate(placed, policy, lengths)
        times[overlap] = max(s.times[-1] for s in sequences)
        load = simulator.timeline.load_s
        assert (simulator.timeline.wait_s >= 0.99 * load) is not overlap
    assert times[True] < times[False]


def test_products_in_passes_and_calls_of_attention_take_longer_than_by_themselves() -> None:
    model, lengths = shape("facebook/opt-1.3b"), [Lengths(4, 6)] * 5
    policy = OffloadPolicy(5, schedule="row")
    placed = place_model(PlannedJob(model, lengths), policy, None, 8, Machine(LAPTOP))
    tasks = []
    for changes in ({}, {"in_passes": 0.5, "sequence_call_s": 1e-3, "layer_call_s": 1e-2}):
        host = replace(LAPTOP.host, **{"layer_call_s": 0.0} | changes)
        simulator = Simulator(placed, policy, Machine(replace(LAPTOP, host=host)))
        run_job([simulator], simulated_sequences(lengths))
        tasks.append(simulator.timeline.tasks)
    assert tasks[1]["task_products"] == pytest.approx(2 * tasks[0]["task_products"])
    calls = 5 * 6 * model.num_layers  # a prompt and five tokens of each sequence
    assert tasks[1]["task_attention"] == pytest.approx(tasks[0]["task_attention"] + 1e-3 * calls)
    between = 1e-2 * simulator.timeline.passes * model.num_layers
    assert tasks[1]["task_other"] == pytest.approx(tasks[0]["task_other"] + between)


@pytest.mark.parametrize(
    ("rows", "bottleneck"), [(2, "disk"), (64, "products")], ids=["limited by the disk", "limited by arithmetic"]
)
def test_products_and_reads_slow_each_other_while_both_run(rows: int, bottleneck: str) -> None:
    """What is shorter takes 1 / share as long; what is longer is slowed for that long."""
    model, lengths = shape("facebook/opt-1.3b"), [Lengths(1, 8)] * rows
    policy = OffloadPolicy(rows, schedule="row", weights=(0.0, 0.0, 1.0))
    placed = place_model(PlannedJob(model, lengths), policy, None, 8, Machine(LAPTOP))
    tasks = {}
    for name, of_products, of_disk in (("alone", 1.0, 1.0), ("both", 0.5, 0.8)):
        machine = replace(LAPTOP, host=replace(LAPTOP.host, beside_disk=of_products),
                          disk=replace(LAPTOP.disk, beside_products=of_disk))  # fmt: skip
        simulator = Simulator(placed, policy, Machine(machine))
        run_job([simulator], simulated_sequences(lengths))
        tasks[name] = simulator.timeline.tasks["task_products"], simulator.timeline.tasks["task_load_weights"]
    (products, reads), (slow_products, slow_reads) = tasks["alone"], tasks["both"]
    assert (reads > 2 * products) is (bottleneck == "disk")
    if bottleneck == "disk":
        assert slow_products == pytest.approx(2 * products)
        assert slow_reads == pytest.approx(reads + (1 - 0.8) * 2 * products)
    else:
        assert slow_reads == pytest.approx(reads / 0.8)
        assert slow_products == pytest.approx(products + (1 - 0.5) * reads / 0.8)


def test_a_search_without_a_device_ends_in_seconds_and_fits() -> None:
    planner = planner_of("facebook/opt-6.7b", Lengths(256, 32))
    policy = OffloadPolicy(16, 4, "zigzag", weight_bits=4)
    estimate, prediction = planner.estimate(policy), planner.predict(policy)
    assert prediction.peak.host <= LAPTOP.host.memory
    assert estimate.throughput_tok_s == pytest.approx(prediction.throughput_tok_s, rel=0.25)


@pytest.mark.parametrize("schedule", ["row", "sweep"])
def test_planning_a_long_prompt_takes_steps_by_its_length_and_not_by_its_square(schedule: Schedule) -> None:
    """Counted, not timed: with four times the tokens and all of the cache on disk, no function runs through many more
    than four times the lines of Python."""
    model = shape("facebook/opt-125m")
    policy = OffloadPolicy(2, schedule=schedule, cache=(0.0, 0.0, 1.0), weights=(0.0, 1.0, 0.0), prefill_chunk=32)

    def lines(prompt: int) -> Counter[str]:
        counted: Counter[str] = Counter()

        def count(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            counted[frame.f_code.co_qualname] += 1
            return count

        lengths = [Lengths(prompt, 4)] * 2
        before = sys.gettrace()
        sys.settrace(count)
        try:
            placed = place_model(PlannedJob(model, lengths), policy, None, 2, Machine(LAPTOP))
            simulate(placed, policy, lengths)
        finally:
            sys.settrace(before)
        return counted

    lines(8)  # what is computed once
    short, long = lines(256), lines(1024)
    assert {name: count for name, count in long.items() if count > 1000 and count > 4.5 * short[name]} == {}


def test_blocks_on_disk_are_counted_as_they_fill_and_anew_after_preemption() -> None:
    model = shape("facebook/opt-125m")
    policy = OffloadPolicy(2, schedule="sweep", cache=(0.0, 0.5, 0.5))
    placed = place_model(PlannedJob(model, [Lengths(64, 8)]), policy, None, 2, Machine(LAPTOP))
    simulator, first = Simulator(placed, policy, Machine(LAPTOP)), placed.plan.kv_blocks
    (sequence,) = simulated_sequences([Lengths(64, 8)])
    sequence.block_table = [first, 0, first + 1, 1]
    for cached, count, expected in ((0, 8, (0, 1)), (8, 12, (1, 1)), (20, 4, (2, 1)), (24, 8, (2, 0)), (0, 32, (0, 2))):
        sequence.cached = cached
        assert simulator._blocks_on_disk([ScheduledChunk(sequence, count)]) == expected
    sequence.block_table, sequence.cached = [0, 1, 2, first], 32
    assert simulator._blocks_on_disk([ScheduledChunk(sequence, 0)]) == (1, 0)
