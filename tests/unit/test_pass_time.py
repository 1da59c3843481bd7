"""How fast a job goes under a memory plan: what decides between placements, rings and weight formats."""

from dataclasses import replace
from functools import cache

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engines.models import shapes
from engines.offload.memory.host import plan_host_memory
from engines.offload.memory.layout import READS, matrices_of, tiles_of
from engines.offload.memory.pass_time import JobPasses, PassRates
from engines.offload.memory.plan import MemoryRequest
from engines.offload.memory.storage import Panels, Plain
from harness.api import InfeasibleError, OffloadPolicy

SHAPE = shapes.shape("facebook/opt-1.3b")
MIB = 1 << 20
#: What opt-1.3b's cells of 2026-11-25 were measured with: products in twelve bits cost more, at many rows much more.
DISK, PLAIN, EXACT12 = 3.7e9, 820e9, 520e9


def rates(flops=PLAIN, disk=DISK, fixed=5e-11):
    return PassRates(disk, 4 * MIB, lambda rows: fixed + 2 * rows / flops, 30e9)


@cache
def request(exact12=False, prompt=128, new=16):
    matrices = matrices_of(SHAPE)
    tiles = tiles_of(matrices, [Panels(exact12=exact12)] * len(matrices))
    return MemoryRequest(SHAPE, tiles, Plain("bfloat16"), 2, 0, 50 * MIB, (9 * MIB, 4096), prompt + new,
                         prompt + new // 2, mean_new=new)  # fmt: skip


def speed(policy, exact12, budget=1200 * MIB, **changes):
    return plan_host_memory(
        request(exact12), policy, budget, rates(flops=EXACT12 if exact12 else PLAIN, **changes)
    ).tokens_per_s


def test_the_format_follows_what_limits_the_job():
    """As measured on opt-1.3b in 1.2 GiB: few rows wait for the disk, many for products."""
    row = OffloadPolicy(8, schedule="row")
    zigzag = OffloadPolicy(7, 4, "zigzag")
    assert speed(row, exact12=True) > speed(row, exact12=False)
    assert speed(zigzag, exact12=True) < speed(zigzag, exact12=False)
    assert speed(zigzag, exact12=True, disk=0.5e9) > speed(zigzag, exact12=False, disk=0.5e9), "on a slower disk"


def passes(policy, sequences=8, streamed=2 << 30, chunk=512, prompt=128, new=16, **changes):
    return JobPasses(request(prompt=prompt, new=new), policy, rates(**changes), sequences, chunk, streamed)


@pytest.mark.parametrize("schedule", ["row", "zigzag", "sweep"])
def test_a_job_limited_by_the_disk_takes_the_time_of_its_reads(schedule):
    policy = OffloadPolicy(8, 2 if schedule == "zigzag" else 1, schedule)
    sequences = policy.block_size
    found = passes(policy, sequences, disk=1e8).tokens_per_s()
    if schedule == "sweep":
        assert found == pytest.approx(sequences * 1e8 / (2 << 30))
    else:
        size = policy.gpu_batch_size
        prefills = -(-size * 128 // 512)  # 1,024 prompt tokens a batch in chunks of 512
        assert found == pytest.approx(sequences * 16 / ((prefills + 15) * (2 << 30) / 1e8))


def test_without_overlap_reads_and_products_add_up():
    both = passes(OffloadPolicy(8)).tokens_per_s()
    apart = passes(OffloadPolicy(8, overlap=False)).tokens_per_s()
    only_products = passes(OffloadPolicy(8), streamed=0).tokens_per_s()
    only_reads = passes(OffloadPolicy(8), flops=1e18, fixed=0.0).tokens_per_s()
    assert apart < both <= min(only_products, only_reads)


def test_a_cache_on_disk_is_read_by_every_pass():
    in_memory = passes(OffloadPolicy(8), disk=1e8)
    on_disk = passes(OffloadPolicy(8, cache=(0.0, 0.0, 1.0)), disk=1e8)
    added = on_disk.decode_pass().disk_s - in_memory.decode_pass().disk_s
    assert added == pytest.approx(8 * 136 * 2 * 24 * 2048 * 2 / 1e8)


def test_a_sweep_takes_no_more_prompt_tokens_than_its_chunk():
    """32 prompt tokens a pass feed a quarter of the sequences, each with 16 tokens after 128."""
    assert passes(OffloadPolicy(64, schedule="sweep"), 64, chunk=32, disk=1e8).tokens_per_s() == pytest.approx(
        4 * 1e8 / (2 << 30)
    )


@given(
    st.sampled_from(["row", "zigzag", "sweep"]), st.integers(1, 64), st.integers(0, 4 << 30), st.floats(1e8, 1e10),
    st.integers(1, 512), st.integers(1, 64),
)  # fmt: skip
def test_more_bytes_or_a_slower_disk_is_never_faster(schedule, sequences, streamed, disk, prompt, new):
    policy = OffloadPolicy(sequences, schedule=schedule)
    base = passes(policy, sequences, streamed, prompt=prompt, new=new, disk=disk)
    assert base.tokens_per_s() > 0
    assert replace(base, streamed_bytes=streamed + MIB).tokens_per_s() <= base.tokens_per_s()
    assert replace(base, rates=replace(base.rates, disk=disk / 2)).tokens_per_s() <= base.tokens_per_s()


def test_a_mixture_multiplies_each_expert_with_its_share_of_the_rows():
    mixtral = shapes.shape("mistralai/Mixtral-8x7B-v0.1")
    one = replace(passes(OffloadPolicy(64), 64, 0, fixed=0.0), request=replace(request(), shape=mixtral))
    products = 2 * 64 * (mixtral.params_per_layer * mixtral.num_layers + mixtral.head_params) / PLAIN
    time = one.decode_pass()
    assert time.compute_s - mixtral.num_layers * time.attention_s == pytest.approx(products)


@pytest.mark.parametrize("schedule", ["row", "zigzag", "sweep"])
@pytest.mark.parametrize("budget", [700, 1200, 1800, 2800, 4000, 6000])
def test_the_ring_is_as_large_as_reads_in_flight_need(schedule, budget):
    """Where products limit; a disk that limits goes on while a layer attends."""
    policy = OffloadPolicy(4, 2 if schedule == "zigzag" else 1, schedule)
    fast = plan_host_memory(request(), policy, budget * MIB, rates(disk=1e11))
    slow = plan_host_memory(request(), policy, budget * MIB, rates(disk=1e9, flops=1e14))
    largest = plan_host_memory(request(), policy, budget * MIB)
    if len(fast.resident) == len(request().tiles):
        assert fast.slots == 0, "nothing streams"
        return
    assert fast.slots == READS <= slow.slots <= largest.slots
    held = [sum(request().tiles[i].nbytes for i in plan.resident) for plan in (fast, slow, largest)]
    assert held[0] + 4 * MIB > held[1] > held[2] - 4 * MIB, "but for a tile that does not fit"


def test_a_sweep_holds_all_weights_where_enough_sequences_fit_beside_them():
    policy, all_tiles = OffloadPolicy(512, schedule="sweep"), len(request().tiles)
    for budget in (3300, 3600, 4500):
        plan = plan_host_memory(request(), policy, budget * MIB, rates(disk=0.5e9))
        most = plan_host_memory(request(), policy, budget * MIB)
        assert len(plan.resident) == all_tiles and plan.slots == 0
        assert plan.sequences < most.sequences
        assert plan.total_bytes <= budget * MIB
    plan = plan_host_memory(request(), policy, 3300 * MIB, rates(disk=0.5e9))
    apart = plan_host_memory(request(), policy, 3300 * MIB, replace(rates(disk=0.5e9), wait_s=20.0))
    assert apart.sequences > 5 * plan.sequences, "each pass waits for links"
    many = plan_host_memory(request(), policy, 2800 * MIB, rates(disk=8e9))
    assert len(many.resident) < all_tiles, "too few sequences would fit beside all weights"


@given(
    st.integers(300, 5000), st.sampled_from(["row", "zigzag", "sweep"]), st.integers(1, 300), st.floats(1e8, 2e10),
    st.floats(1e10, 5e12), st.sampled_from([None, (0.0, 1.0, 0.0), (0.0, 0.3, 0.7)]),
)  # fmt: skip
def test_a_plan_by_rates_keeps_the_budget_and_refuses_no_more(budget, schedule, size, disk, flops, weights):
    policy = OffloadPolicy(size, 2 if schedule == "zigzag" else 1, schedule, weights)
    try:
        plain = plan_host_memory(request(), policy, budget * MIB)
    except InfeasibleError:
        plain = None
    try:
        plan = plan_host_memory(request(), policy, budget * MIB, rates(flops, disk))
    except InfeasibleError:
        assert plain is None
        return
    assert plan.total_bytes <= budget * MIB
    assert 1 <= plan.sequences <= policy.block_size
    assert plan.tokens_per_s > 0
    assert len(plan.resident) == len(request().tiles) or plan.slots >= 4


def head_held(schedule="sweep", **changes):
    """Tiles, and bytes of the head that a plan holds in memory, and reads."""
    asked = request()
    plan = plan_host_memory(asked, OffloadPolicy(16, schedule=schedule), 1200 * MIB, rates(**changes))
    head = [tile for tile in asked.tiles if tile.matrix == asked.tiles[-1].matrix]
    held = sum(tile.nbytes for tile in head if tile.index in plan.resident)
    return asked, plan, held, sum(tile.nbytes for tile in head) - held


def test_a_sweep_holds_as_much_of_the_head_as_makes_its_reads_as_long_as_its_products():
    asked, plan, held, read = head_held(disk=2.5e9, flops=400e9)
    products = SHAPE.head_params * rates(flops=400e9).value_s(plan.sequences)
    assert read / 2.5e9 <= products < (read + held) / 2.5e9
    assert held / (held + read) > 2 * len(plan.resident) / len(asked.tiles), "more than its even share"


def test_what_is_read_anyway_while_the_head_is_multiplied_is_held_evenly():
    for changes in ({"schedule": "row"}, {"disk": 1e12}):
        asked, plan, held, read = head_held(**changes)
        assert held / (held + read) == pytest.approx(len(plan.resident) / len(asked.tiles), abs=0.06)
