"""Which tier holds what: never over the limit, fractions as they were asked for, refusals with numbers."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.common.work_memory import SLACK_BYTES
from engines.offload.memory.host import plan_host_memory
from engines.offload.memory.kv_blocks import blocks_for, kv_block_bytes
from engines.offload.memory.layout import Matrix, tiles_of
from engines.offload.memory.plan import MemoryRequest
from engines.offload.memory.storage import Grouped, Plain
from harness.api import InfeasibleError, ModelShape, OffloadPolicy

SHAPE = ModelShape("opt", 2, 64, 256, 4, 4, 16, 512, 128, params_per_layer=49152, params_total=131072)


def demand(**changes):
    tiles = tiles_of([Matrix(f"m{i}", 256, 64, "g") for i in range(20)], [Plain("float32")] * 20)
    work = {"small_bytes": 1000, "attention_bytes": (0, 0), "max_sequence": 48, "mean_sequence": 40}
    return dataclasses.replace(MemoryRequest(SHAPE, tiles, Plain("float32"), 4, 0, **work), **changes)


MIB = 1 << 20


@given(
    st.integers(64, 400),
    st.sampled_from(["row", "zigzag", "sweep"]),
    st.integers(1, 5000),
    st.integers(1, 4),
    st.sampled_from([None, 0.0, 0.25, 1.0]),
)
def test_a_plan_never_exceeds_its_budget(mib, schedule, size, batches, share):
    weights = None if share is None else (0.0, share, 1.0 - share)
    batches = batches if schedule == "zigzag" else 1
    policy = OffloadPolicy(schedule=schedule, gpu_batch_size=size, num_gpu_batches=batches, weights=weights)
    wanted = demand()
    try:
        plan = plan_host_memory(wanted, policy, mib * MIB)
    except InfeasibleError as exc:
        assert "the budget is" in str(exc)
        if schedule == "sweep":
            assert mib < 80, "one sequence fits in little"
        return
    held = sum(wanted.tiles[i].nbytes for i in plan.resident)
    rows = plan.sequences + batches * plan.chunk
    activations = rows * (SHAPE.hidden + SHAPE.ffn) * 4 + plan.sequences * SHAPE.vocab * 4
    ring = plan.slots * max(b.span for b in wanted.tiles)
    cache = plan.kv_blocks * kv_block_bytes(SHAPE, Plain("float32"))
    assert cache + held + ring + activations + SLACK_BYTES <= mib * MIB
    assert plan.kv_blocks >= blocks_for(48)
    if schedule == "sweep":
        assert 1 <= plan.sequences <= size
        assert plan.kv_blocks >= plan.sequences * blocks_for(40)
    else:
        assert plan.sequences == size * batches
        assert plan.kv_blocks >= plan.sequences * blocks_for(48)
    if share is not None:
        total = sum(b.nbytes for b in wanted.tiles)
        assert abs(held / total - share) <= 1 / len(wanted.tiles)


def test_a_budget_below_what_is_needed_is_refused_with_numbers_and_the_nearest_policy():
    policy = OffloadPolicy(schedule="zigzag", gpu_batch_size=2000, num_gpu_batches=2)
    with pytest.raises(InfeasibleError, match=r"needs \d+ MiB for 4000 sequences of 48 tokens") as caught:
        plan_host_memory(demand(), policy, 120 * MIB)
    size = int(re.search(r"gpu_batch_size (\d+) would fit", str(caught.value))[1])
    plan_host_memory(demand(), dataclasses.replace(policy, gpu_batch_size=size), 120 * MIB)
    with pytest.raises(InfeasibleError):
        plan_host_memory(demand(), dataclasses.replace(policy, gpu_batch_size=size + 1), 120 * MIB)
    with pytest.raises(InfeasibleError, match="use a larger budget"):
        plan_host_memory(demand(), policy, 10 * MIB)


def test_rows_that_are_scored_together_share_the_memory_of_all_batches():
    one, four = (plan_host_memory(demand(), OffloadPolicy(4, batches, "zigzag"), None) for batches in (1, 4))
    assert four.chunk_limits(1.0) == one.chunk_limits(1.0)


@given(
    st.sampled_from(
        [(768, 3072, 12, 50272), (2048, 8192, 24, 50272), (4096, 11008, 32, 32000), (576, 1536, 30, 49152)]
    ),
    st.sampled_from([Plain("bfloat16"), Plain("float32"), Grouped(4, 64), Grouped(8, 128, group_axis=0)]),
    st.floats(0, 1),
)
def test_the_part_of_the_weights_in_memory_is_the_one_asked_for_to_a_point(sizes, stored, share):
    """Of models from 125 million to 7 billion parameters."""
    hidden, ffn, layers, vocab = sizes
    square = [(hidden, hidden)] * 4 + [(ffn, hidden), (hidden, ffn)]
    matrices = [Matrix(f"{i}.{j}", *size, f"layer-{i}") for i in range(layers) for j, size in enumerate(square)]
    matrices.append(Matrix("head", vocab, hidden, "outside"))
    tiles = tiles_of(matrices, [stored] * (len(matrices) - 1) + [Plain("bfloat16")])
    plan = plan_host_memory(demand(tiles=tiles), OffloadPolicy(weights=(0.0, share, 1 - share)), None)
    total = sum(b.nbytes for b in tiles)
    assert abs(sum(tiles[i].nbytes for i in plan.resident) / total - share) <= 0.01


@given(st.floats(0, 1), st.integers(72, 400), st.sampled_from(["row", "sweep"]))
def test_the_part_of_the_cache_on_disk_is_the_one_asked_for_to_a_page(share, mib, schedule):
    policy = OffloadPolicy(schedule=schedule, gpu_batch_size=8, cache=(0.0, 1 - share, share))
    plan = plan_host_memory(demand(), policy, mib * MIB)
    blocks = plan.kv_blocks + plan.disk_kv_blocks
    assert abs(plan.disk_kv_blocks - share * blocks) <= 1
    assert blocks >= blocks_for(48)


def test_without_a_device_its_tier_is_memory_too():
    both, host = (
        plan_host_memory(demand(), OffloadPolicy(weights=w), None) for w in ((0.25, 0.25, 0.5), (0, 0.5, 0.5))
    )
    assert both.resident == host.resident


def test_resident_blocks_are_spread_over_the_pass():
    plan = plan_host_memory(demand(), OffloadPolicy(weights=(0, 0.5, 0.5)), None)
    assert sorted(plan.resident) == list(range(1, 20, 2))
