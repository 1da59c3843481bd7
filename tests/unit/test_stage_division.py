"""Which rank gets which layers: the shortest longest stage, equal ranks, unequal ones, and those that only slow."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.models import shapes
from engines.offload.memory.partition import chosen_cut, shortest_stages, stage_seconds
from engines.offload.memory.pass_time import PassRates
from engines.offload.memory.stage_times import RankRates, StageTimes, stage_shape
from engines.offload.memory.storage import Plain
from engines.offload.pipeline.stages import equal_stages, order_of, timed_stages
from harness.api import HarnessError, OffloadPolicy

MIB = 1 << 20
SHAPE = shapes.shape("facebook/opt-1.3b")


def cuts(layers, stages, may_be_empty):
    """All of them: where each stage ends."""
    ways = itertools.combinations_with_replacement if may_be_empty else itertools.combinations
    inner = range(layers) if may_be_empty else range(1, layers)  # the last stage has a layer in any case
    return [[*ends, layers] for ends in ways(inner, stages - 1)]


@given(st.integers(1, 7), st.integers(1, 4), st.booleans(), st.data())
def test_no_other_cut_has_a_shorter_longest_stage(layers, stages, may_be_empty, data):
    """Whatever a stage takes: stages of different ranks, times that do not grow with the layers, or none at all."""
    stages = min(stages, layers)
    time = st.sampled_from([0.5, 1.0, 2.0, math.inf]) | st.floats(1e-9, 1e9)
    places = [(k, a, b) for k in range(stages) for a in range(layers) for b in range(a + 1, layers + 1)]
    table = dict(zip(places, data.draw(st.lists(time, min_size=len(places), max_size=len(places))), strict=True))

    def seconds(stage, first, last):
        return table[stage, first, last]

    ends = shortest_stages(layers, stages, seconds, may_be_empty)
    assert ends in cuts(layers, stages, may_be_empty)
    shortest = min(max(stage_seconds(cut, seconds)) for cut in cuts(layers, stages, may_be_empty))
    assert max(stage_seconds(ends, seconds)) == shortest
    chosen = chosen_cut(layers, cuts(layers, stages, False)[0], seconds)
    assert chosen.longest_s * 0.9 <= min(max(stage_seconds(cut, seconds)) for cut in cuts(layers, stages, True))


def test_the_head_counts_and_the_leader_has_it():
    shape = shapes.shape("facebook/opt-125m")
    stages = equal_stages(shape, 4).stages
    assert list(stages) == order_of(4) == [1, 2, 3, 0]
    assert [stage.last - stage.first for stage in stages.values()] == [3, 4, 4, 1], "the head is five of its layers"
    assert [stage.first for stage in stages.values()] == [0, 3, 7, 11]
    with pytest.raises(HarnessError, match="13 stages for 12 layers"):
        equal_stages(shape, 13)


def test_a_stage_has_its_part_of_a_models_sizes():
    whole = shapes.shape("mistralai/Mixtral-8x7B-v0.1")
    first, last = stage_shape(whole, 20, is_last=False), stage_shape(whole, 12, is_last=True)
    assert (first.head_params, last.head_params) == (0, whole.head_params)
    assert first.forward_stored == last.forward_stored == whole.forward_stored
    assert first.params_idle + last.params_idle == whole.params_idle


def rank(slower=1.0, disk=1e9, budget=None):
    """A rank that multiplies 100 GFLOP/s but for a `slower` factor, and streams what `budget` bytes do not hold."""
    return RankRates(PassRates(disk, 4 * MIB, lambda rows: slower * (1e-10 + 2e-11 * rows), 20e9), 2, budget)


def divided(*ranks, **policy):
    policy = OffloadPolicy(**{"schedule": "sweep", "gpu_batch_size": 16, **policy})
    plain = Plain("bfloat16")
    times = StageTimes(SHAPE, policy, plain, plain, plain, "bfloat16", 160, 144, 32)
    division = timed_stages(times, ranks)
    sizes = {number: stage.last - stage.first for number, stage in division.stages.items()}
    assert sum(sizes.values()) == SHAPE.num_layers
    seconds = {n: times.seconds(ranks[n], size, is_last=n == 0) for n, size in sizes.items()}
    return sizes, seconds, division.note


def equal_sizes(ranks):
    return {n: stage.last - stage.first for n, stage in equal_stages(SHAPE, ranks).stages.items()}


def test_ranks_that_measure_alike_have_equal_stages():
    assert divided(rank(), rank(), rank())[0] == equal_sizes(3)
    assert divided(rank(1.04), rank(0.97), rank(), rank(1.05))[0] == equal_sizes(4), "but for what rates vary"
    assert divided(*[rank(budget=900 * MIB)] * 3)[0] == equal_sizes(3), "and where weights stream"


def test_a_faster_rank_gets_more_layers_so_that_all_take_as_long():
    sizes, seconds, note = divided(rank(), rank(0.5), rank())
    assert sizes[1] > 1.7 * sizes[2]
    a_layer = max(each / sizes[n] for n, each in seconds.items())
    assert max(seconds.values()) - min(seconds.values()) <= a_layer
    assert f"rank 1 has {sizes[1]} (" in note and f"rank 0 has {sizes[0]} (" in note


def test_a_rank_that_has_to_read_gets_what_it_reads_while_others_compute():
    sizes, seconds, _ = divided(rank(), rank(budget=500 * MIB, disk=2e8), rank())
    assert 0 < sizes[1] < sizes[2]
    assert seconds[1] <= max(seconds[0], seconds[2]) * 1.2


def test_a_rank_that_only_slows_the_others_gets_nothing_and_a_note_says_so():
    sizes, _, note = divided(rank(), rank(), rank(60), rank())
    assert list(sizes) == [1, 3, 0]
    assert "none: rank 2, as with layers on every rank the longest stage would take" in note
    sizes, _, note = divided(rank(), rank(budget=20 * MIB))
    assert list(sizes) == [0], "not even a layer fits rank 1"
    assert "would take more memory than it has" in note
