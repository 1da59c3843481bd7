"""Which experts the host multiplies beside a device, and what plans know of it."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.models.shapes import shape
from engines.offload.memory.expert_split import (
    MOST_ROWS,
    ExpertRates,
    ExpertSplit,
    RoutedExpert,
    for_host,
    held_experts,
)
from engines.offload.memory.expert_usage import ExpertUsage
from engines.offload.memory.layout import Matrix, tiles_of
from engines.offload.memory.plan import evenly
from engines.offload.memory.storage import Plain
from engines.planning.device_planner import DevicePlanner
from engines.planning.engine_cost_models import engine_cost_model
from engines.planning.expert_division import IN_MEMORY, ON_DEVICE, ON_DISK, divided
from engines.planning.machine import Machine
from engines.planning.planned_job import PlannedJob
from engines.planning.search import SearchSpace, search
from engines.planning.workload import Lengths
from harness import hardware
from harness.api import OffloadPolicy

T4 = hardware.load("t4_gcp")
RATES = ExpertRates(link=1000.0, host=[(1, 0.0005), (4, 0.001), (16, 0.004)])


def routed(expert, rows, nbytes):
    return RoutedExpert(expert, rows, RATES.copy_s(nbytes), RATES.host_s(nbytes, rows))


def finished(chosen, offered, link_s, host_s):
    """When link and host are both done, if the host multiplies those `chosen`."""
    for each in offered:
        if each in chosen:
            host_s += each.host_s
        else:
            link_s += each.copy_s
    return max(link_s, host_s)


def test_the_hosts_seconds_are_those_measured_and_between_and_beyond_them():
    assert [RATES.host_s(1000, rows) for rows in (1, 4, 16)] == pytest.approx([0.5, 1.0, 4.0])
    assert RATES.host_s(1000, 10) == pytest.approx(2.5)  # halfway from 4 rows to 16
    assert RATES.host_s(1000, 32) == pytest.approx(8.0)
    assert RATES.host_s(2000, 4) == 2 * RATES.host_s(1000, 4)
    assert RATES.copy_s(500) == 0.5
    bent = ExpertRates(link=1.0, host=[(2, 0.0005), (4, 0.001), (16, 0.002)])
    assert [bent.host_s(1000, rows) for rows in (1, 2, 3, 10, 24)] == pytest.approx([0.5, 0.5, 0.75, 1.5, 3.0])


@given(
    rows=st.lists(st.integers(1, 40), max_size=7),
    link_s=st.floats(0, 5),
    host_s=st.floats(0, 5),
    nbytes=st.integers(1, 2000),
)
def test_no_other_division_of_equal_experts_ends_sooner(rows, link_s, host_s, nbytes):
    offered = [routed(e, count, nbytes) for e, count in enumerate(rows)]
    found = for_host(offered, link_s, host_s)
    every = itertools.chain.from_iterable(itertools.combinations(offered, n) for n in range(len(rows) + 1))
    soonest = min(finished(some, offered, link_s, host_s) for some in every)
    assert finished(found, offered, link_s, host_s) == pytest.approx(soonest)


def chosen(offered, **busy):
    return [each.expert for each in for_host(offered, **busy)]


def test_nothing_goes_to_the_host_without_a_gain_and_the_fewest_rows_go_first():
    few = [routed(e, rows, 1000) for e, rows in enumerate((9, 1, 4))]
    assert chosen(few) == [1, 2]  # 1.5 s there, 1 s of copies
    assert chosen(few, host_s=3.0) == []
    assert chosen(few, link_s=5.0) == [1, 2, 0]
    assert chosen([]) == []
    assert chosen([RoutedExpert(0, 1, copy_s=1.0, host_s=1.0)]) == []


def test_experts_of_very_many_rows_are_copied():
    assert chosen([RoutedExpert(0, MOST_ROWS, 1.0, 1e-9), RoutedExpert(1, MOST_ROWS + 1, 1.0, 1e-9)]) == [0]


def split_of(experts=3, on_disk=(), resident=(), rates=RATES):
    """Of a layer with a dense matrix of 4,096 bytes and experts of as many each."""
    matrices = [Matrix("l.dense", 16, 64, "l")]
    matrices += [Matrix("l.mix.up", 16, 64, "l", expert=e) for e in range(experts)]
    tiles = tiles_of(matrices, [Plain("float32")] * len(matrices))
    usage = ExpertUsage({m.name: ("l.mix", m.expert) for m in matrices if m.expert is not None}, 1 / experts)
    of = {e: [tile.index for tile in tiles if tile.matrix == f"l.mix.up[{e}]"] for e in range(experts)}
    below = {i for e in on_disk for i in of[e]}
    held = held_experts(tiles, {tile.index for tile in tiles} - below, usage)
    streamed = [tile for tile in tiles if tile.index not in {i for e in resident for i in of[e]}]
    return ExpertSplit(held, streamed, usage, rates), of


def never(index):
    return False


def test_what_was_asked_of_the_device_or_is_on_its_way_is_not_multiplied_twice():
    split, of = split_of()  # an expert takes the host 2.0 s, and the link 4.1, as does the dense matrix
    assert split.choose("l.mix", [1, 1, 1], [0, 0, 0], never) == [0, 1, 2]
    split.begin_pass()
    assert split.choose("l.mix", [1, 1, 1], [0, 5, 0], never) == [0, 2]
    split.begin_pass()
    assert split.choose("l.mix", [1, 1, 1], [0, 0, 0], set(of[2]).__contains__) == [0, 1]
    split.begin_pass()
    assert split.choose("l.mix", [0, 1, 0], [0, 0, 0], never) == [1]
    assert split.choose("m.mix", [1, 1], [0, 0], never) == []


def test_the_host_is_as_busy_as_earlier_batches_of_a_pass_made_it():
    split, _ = split_of()
    first = split.choose("l.mix", [1, 1, 1], [0, 0, 0], never)
    second = split.choose("l.mix", [1, 1, 1], [0, 0, 0], never)
    assert len(second) < len(first)
    split.begin_pass()
    assert split.choose("l.mix", [1, 1, 1], [0, 0, 0], never) == first


def test_at_first_the_host_has_nothing_else_to_do():
    one, _ = split_of(experts=1, rates=ExpertRates(1000.0, [(1, 7.5 / 4096)]))  # 7.5 s; dense matrix and copy take 8.2
    assert one.choose("l.mix", [1], [0], never) == [0]


def test_an_expected_expert_has_its_share_of_a_batchs_rows():
    split, _ = split_of(experts=8)
    every = range(99)
    for rows, batches, share in ((64, 1, 8), (64, 2, 4), (1, 1, 1)):
        found = split.expected(every, rows, batches)["l.mix"]
        assert found
        for each in found:
            assert each.rows == share
            assert each.copy_s == pytest.approx(4.096, rel=1e-6)
            assert each.host_s == pytest.approx(batches * RATES.host_s(4096, share), rel=1e-6)


@pytest.mark.parametrize(("flops", "seconds_per_byte"), [(1e6, 2 * 8 / 4 / 1e6), (1e15, 1 / T4.host.bandwidth)])
def test_a_plans_host_multiplies_at_its_rate_of_products_or_of_memory(flops, seconds_per_byte):
    """Experts of 1,024 values in 4,096 bytes, of which a pass of 32 rows needs each with a probability of a half."""
    matrices = [Matrix("l.mix.up", 16, 64, "l", expert=e) for e in range(4)]
    tiles = tiles_of(matrices, [Plain("float32")] * 4)
    usage = ExpertUsage({m.name: ("l.mix", m.expert) for m in matrices}, 1 / 4)
    machine = Machine(replace(T4, host=replace(T4.host, flops={"1": flops}), link=replace(T4.link, h2d=1e4)))
    where = [IN_MEMORY] * (len(tiles) - 1) + [ON_DISK]
    on_host, seconds = divided(tiles, where, [0.5] * len(tiles), usage, machine, 32, 1)
    assert on_host == set(range(len(tiles) - 1))
    assert seconds == {"l.mix": pytest.approx(3 * 2048 * seconds_per_byte)}
    nowhere = divided(tiles, [ON_DEVICE] * len(tiles), [1.0] * len(tiles), usage, machine, 32, 1)
    assert nowhere == (frozenset(), {"l.mix": 0})


def test_experts_on_disk_or_on_the_device_are_not_the_hosts():
    split, _ = split_of(on_disk=[0], resident=[1])
    assert split.choose("l.mix", [1, 1, 1], [0, 0, 0], never) == [2]


def test_what_the_host_is_expected_to_multiply_is_not_copied_ahead():
    split, of = split_of(experts=8)
    every = sorted(i for tiles in of.values() for i in tiles)
    ahead = split.to_copy([0, *every], 8)
    assert 0 in ahead
    assert set(ahead) < {0, *every}
    chosen = split.choose("l.mix", [1] * 8, [0] * 8, set(ahead).__contains__)
    assert {i for e in chosen for i in of[e]} == set(every) - set(ahead)
    below, _ = split_of(experts=4, on_disk=[0])  # the link has that one's copy to do as well: 8.2 s, the host 6.1
    assert [each.expert for each in below.expected(range(99), 4)["l.mix"]] == [1, 2, 3]
    # in two batches of four rows each weight is read twice by the host
    assert len(split.to_copy([0, *every], 8, 2)) >= len(ahead)
    slow, _ = split_of(experts=8, rates=ExpertRates(1e9, [(1, 1.0)]))
    assert slow.to_copy([0, *every], 8) == [0, *every]


MIXTRAL = PlannedJob(shape("mistralai/Mixtral-8x7B-v0.1"), [Lengths(77, 128)], budget=170 << 30)


def planned(profile=T4, job=MIXTRAL, **policy):
    """The plan's tokens/s, with all fractions as the engine would choose them."""
    planner = DevicePlanner(job, profile, engine_cost_model("offload"))
    return planner.predict(planner.with_fractions(OffloadPolicy(schedule="sweep", **policy))).throughput_tok_s


def test_a_plan_knows_what_the_host_saves_few_rows():
    for size in (1, 16, 256):
        assert planned(gpu_batch_size=size, cpu_experts=True) > 1.3 * planned(gpu_batch_size=size)
    # of many rows all are copied
    many = planned(gpu_batch_size=2048)
    assert planned(gpu_batch_size=2048, cpu_experts=True) == pytest.approx(many, rel=0.02)


def test_a_slow_host_multiplies_none_and_a_dense_model_has_none():
    slow = replace(T4, host=replace(T4.host, flops={"1": 1e6}))
    assert planned(slow, gpu_batch_size=16, cpu_experts=True) == pytest.approx(
        planned(slow, gpu_batch_size=16), rel=0.02
    )
    dense = replace(MIXTRAL, shape=shape("facebook/opt-30b"))
    assert planned(job=dense, gpu_batch_size=16, cpu_experts=True) == planned(job=dense, gpu_batch_size=16)


def test_one_sequence_reads_only_the_experts_that_it_needs():
    """Two of eight: a quarter of the experts' bytes, and all others."""
    one, many = planned(gpu_batch_size=1), planned(gpu_batch_size=16)
    assert many / 16 < one < many / 16 * 4


def test_a_search_has_the_host_multiply_where_that_is_faster():
    planner = DevicePlanner(replace(MIXTRAL, requests=16), T4, engine_cost_model("offload"))
    space = SearchSpace(schedules=["sweep"], requests=16)
    best = search(planner, space).best
    assert best.policy.cpu_experts
    alone = planner.predict(planner.with_fractions(replace(best.policy, cpu_experts=False, weights=None)))
    assert best.prediction.throughput_tok_s > 1.3 * alone.throughput_tok_s


@given(data=st.data())
def test_experts_that_the_host_may_multiply_are_placed_as_a_whole(data):
    matrices = [Matrix("l.dense", 64, 64, "l")]
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    for e, size in enumerate(sizes):
        matrices += [Matrix(f"l.mix.{name}", size, 64, "l", expert=e) for name in ("up", "down")]
    tiles = tiles_of(matrices, [Plain("float32")] * len(matrices), 256)
    unit = {tile.index: tile.matrix.partition("[")[2] or tile.index for tile in tiles}
    nbytes = data.draw(st.integers(0, sum(tile.nbytes for tile in tiles)))
    chosen = evenly(tiles, range(len(tiles)), nbytes, unit.__getitem__)
    assert sum(tiles[i].nbytes for i in chosen) <= nbytes
    for e in range(len(sizes)):
        own = {i for i, of in unit.items() if of == f"{e}]"}
        assert own <= chosen or not own & chosen
    assert len(chosen) == len(tiles) or nbytes < sum(tile.nbytes for tile in tiles)
