"""Which tier holds what: never over a limit, fractions as they were asked for, refusals with numbers."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.common.work_memory import CONTEXT_BYTES, SLACK_BYTES
from engines.models import shapes
from engines.offload.device.pinned import PinnedMemory
from engines.offload.memory.device import pinned_sizes, plan_device_memory
from engines.offload.memory.host import plan_host_memory
from engines.offload.memory.kv_blocks import STAGES, blocks_for, kv_block_bytes
from engines.offload.memory.layout import ALIGN, Matrix, matrices_of, matrix_spans, tiles_of
from engines.offload.memory.pinned_pieces import packed, pinned_bytes
from engines.offload.memory.plan import MemoryRequest
from engines.offload.memory.storage import Grouped, Plain
from engines.offload.pass_ops import attention_overlaps, pass_ops, tiles_held
from engines.planning.simulated import search_policy
from harness import api, hardware
from harness.common.published import published_rows
from harness.suite import config

GIB, MIB = 1 << 30, 1 << 20


@settings(deadline=None)
@given(st.lists(st.integers(1, 5 * MIB), max_size=60))
def test_pinned_memory_is_pieces_of_powers_of_two_with_room_for_each(sizes):
    taken = []

    def allocate(nbytes):
        assert nbytes & (nbytes - 1) == 0
        taken.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    memory = PinnedMemory(sizes, allocate)
    assert sum(taken) == pinned_bytes(sizes)
    places = []
    for size in sizes:
        place = memory.take(size)
        assert len(place) >= size
        places.append((place.data_ptr(), place.data_ptr() + len(place)))
    places.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places)), "two share a place"
    with pytest.raises(IndexError):
        memory.take(1)


def test_pinned_memory_wastes_little_of_what_a_model_takes():
    """Torch's own allocator would round each of these up to 64 MiB and more."""
    sizes = [41 * MIB] * 300 + [9 * MIB] * 96
    assert pinned_bytes(sizes) <= 1.05 * sum(sizes)
    assert all(sum(parts) <= size for size, parts in packed([s // ALIGN * ALIGN for s in sizes]))


def demand(model="facebook/opt-30b", stored=None, cache=None, prompt=512, new=32):
    shape = shapes.shape(model)
    matrices = matrices_of(shape)
    how = stored or Plain("float16")
    tiles = tiles_of(matrices, [how if m.in_layer else Plain("float16") for m in matrices], 32 << 20)
    return MemoryRequest(
        shape=shape,
        tiles=tiles,
        cache=cache or Plain("float16"),
        compute_bytes=2,
        cast_bytes=(64 << 20) if stored else 0,
        small_bytes=50 * MIB,
        attention_bytes=(0, 0),
        max_sequence=prompt + new,
        mean_sequence=prompt + new // 2,
    )


def search_for(name, device_memory, host_memory, profile, **policy):
    """What a search finds for a model in 16 bits."""
    limits = api.HardwareLimits(device_memory=device_memory, host_memory=host_memory)
    spec = api.RunSpec("offload", api.ModelSpec(name, "dummy"), api.WorkloadSpec("synthetic", 512, 32, "auto"),
                   api.OffloadPolicy(1, **policy), tune="search", limits=limits)  # fmt: skip
    shape = shapes.shape(name)
    return search_policy(spec, api.LocalModel("", shape, 2 * shape.params_total, "float16", ""), profile, [])


def bytes_of(one, plan):
    """What the plan takes, added up again: of the device beside work and the rest, and pinned."""
    block = kv_block_bytes(one.shape, one.cache)
    staged = STAGES * (block // one.shape.num_layers)
    span = max(b.span for b in one.tiles)
    device = plan.kv_blocks * block + plan.stage_blocks * staged + plan.slots * span
    device += sum(one.tiles[i].nbytes for i in plan.resident)
    return device, pinned_bytes(pinned_sizes(one, plan.pinned, plan.host_kv_blocks, plan.pinned_stage_blocks))


@settings(deadline=None, max_examples=40)
@given(
    schedule=st.sampled_from(["row", "zigzag", "sweep"]),
    batch=st.integers(1, 200),
    batches=st.integers(1, 4),
    weights=st.sampled_from([None, (0.1, 0.9, 0.0), (0.0, 0.5, 0.5), (0.0, 0.0, 1.0)]),
    cache=st.sampled_from([None, (1.0, 0.0, 0.0), (0.5, 0.5, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.2, 0.3, 0.5)]),
    device=st.integers(2, 40),
    host=st.integers(1, 220),
    bits=st.sampled_from([16, 4]),
)
def test_a_plan_keeps_within_both_limits(schedule, batch, batches, weights, cache, device, host, bits):
    batches = batches if schedule == "zigzag" else 1
    stored, cached = (Grouped(4, 64), Grouped(4, 64)) if bits == 4 else (None, None)
    one = demand(stored=stored, cache=cached)
    policy = api.OffloadPolicy(batch, batches, schedule, weights, cache)
    try:
        plan = plan_device_memory(one, policy, device * GIB, host * GIB)
    except api.InfeasibleError as refusal:
        assert "device memory" in str(refusal)
        return
    on_device, pinned = bytes_of(one, plan)
    assert on_device + plan.activation_bytes <= plan.total_bytes <= device * GIB - CONTEXT_BYTES
    assert pinned == plan.pinned_bytes <= host * GIB
    assert not plan.resident & plan.pinned
    assert plan.sequences == policy.block_size or schedule == "sweep"
    blocks = plan.kv_blocks + plan.host_kv_blocks + plan.disk_kv_blocks
    assert blocks >= blocks_for(one.max_sequence)
    lower = plan.host_kv_blocks + plan.disk_kv_blocks
    of_a_batch = lower if schedule == "sweep" else min(lower, batch * blocks_for(one.max_sequence))
    assert min(of_a_batch, blocks_for(one.max_sequence)) <= plan.stage_blocks <= of_a_batch
    staged = STAGES * plan.stage_blocks * kv_block_bytes(one.shape, one.cache) // one.shape.num_layers
    assert plan.stage_blocks <= blocks_for(one.max_sequence) or staged <= device * GIB / 16
    if cache is not None:
        assert (plan.host_kv_blocks, plan.disk_kv_blocks) == pytest.approx(
            (cache[1] * blocks, cache[2] * blocks), abs=1
        )
    if weights is not None:
        whole = sum(b.nbytes for b in one.tiles)
        tile = max(b.nbytes for b in one.tiles) / whole
        for chosen, asked in ((plan.resident, weights[0]), (plan.pinned, weights[1])):
            assert sum(one.tiles[i].nbytes for i in chosen) / whole == pytest.approx(asked, abs=2 * tile)


@pytest.mark.parametrize(
    ("model", "device", "whole"), [("facebook/opt-6.7b", 8, True), ("facebook/opt-175b", 4, False)]
)
def test_while_the_host_attends_the_link_has_room_for_a_layer(model, device, whole):
    """Beside those that an order of nano-batches keeps, unless a layer is too much of the device."""
    one = demand(model)
    apart = api.OffloadPolicy(40, schedule="sweep", cpu_attention=True, nano_batches="KQV0 O1 UG1 D1 KQV1 O0 UG0 D0")
    plan = plan_device_memory(one, apart, device * GIB, 500 * GIB)
    layer = sum(tile.file == one.tiles[0].file for tile in one.tiles)
    spans = matrix_spans(one.tiles)
    attends = [6 * i + 3 for i in range(one.shape.num_layers)]
    streamed = [i not in plan.resident for i in range(len(one.tiles))]
    files = [one.tiles[span.start].file for span in spans]
    overlaps = attention_overlaps(spans, files, attends, streamed, plan.slots)
    held = tiles_held(pass_ops(streamed, spans, 2, overlaps, apart.nano_order))
    assert (plan.slots >= held + layer - sum(not s for s in streamed[:layer])) == whole
    assert plan.slots * one.largest_tile <= device * GIB / 4
    beside = plan_device_memory(one, replace(apart, cpu_attention=False), device * GIB, 500 * GIB)
    assert beside.slots < plan.slots or not whole


def test_weights_that_the_policy_leaves_open_fill_the_device_then_pinned_memory():
    one = demand()
    plan = plan_device_memory(one, api.OffloadPolicy(gpu_batch_size=8, schedule="row"), 16 * GIB, 100 * GIB)
    resident, pinned = (sum(one.tiles[i].nbytes for i in chosen) for chosen in (plan.resident, plan.pinned))
    assert plan.host_kv_blocks == 0
    assert resident > 4 * GIB
    assert resident + pinned == sum(b.nbytes for b in one.tiles), "100 GiB have room for all of the rest"
    tight = plan_device_memory(one, api.OffloadPolicy(gpu_batch_size=8, schedule="row"), 16 * GIB, 20 * GIB)
    assert 17 * GIB < sum(one.tiles[i].nbytes for i in tight.pinned) < 20 * GIB


def test_a_block_that_the_device_cannot_cache_is_cached_in_host_memory():
    one = demand()
    plan = plan_device_memory(one, api.OffloadPolicy(32, 4, "zigzag"), 16 * GIB, 200 * GIB)
    assert plan.host_kv_blocks > plan.kv_blocks > 0
    assert plan.kv_blocks + plan.host_kv_blocks == 128 * blocks_for(544)


def published_policies():
    """FlexGen's own, of its tables 14 to 16: prompt's length, model, bits and policy."""
    for row in published_rows("flexgen_throughput_t4"):
        if row["system"].startswith("flexgen"):
            (wg, wc), (cg, cc), (hg, hc) = ([int(row[f"{a}{b}"]) / 100 for b in "gc"] for a in "wch")
            batches = int(row["num_gpu_batches"])
            policy = api.OffloadPolicy(
                int(row["gpu_batch_size"]), batches, "zigzag" if batches > 1 else "row", (wg, wc, 1 - wg - wc),
                (cg, cc, 1 - cg - cc), (hg, hc, 1 - hg - hc),
            )  # fmt: skip
            yield pytest.param(int(row["prompt_len"]), row["model"], row["system"] == "flexgen_c", policy,
                               id=f"{row['model']}-{row['system']}-{row['prompt_len']}")  # fmt: skip


@pytest.mark.parametrize(("prompt", "model", "compressed", "policy"), list(published_policies()))
def test_flexgen_s_own_policies_run_where_they_ran(prompt, model, compressed, policy):
    """On a T4 and 208 GB of host memory. One of them needs 212 GB by our count, and is refused with the bytes."""
    packed = Grouped(4, 64) if compressed else None
    one = demand(f"facebook/{model}", packed, packed, prompt)
    try:
        plan = plan_device_memory(one, policy, int(15.8 * GIB), int(193 * GIB))
    except api.InfeasibleError as refusal:
        assert (prompt, model, compressed) == (256, "opt-175b", True)
        assert 0 < refusal.lacking["host"] < 5 * GIB and "device" not in refusal.lacking
        return
    blocks = plan.kv_blocks + plan.host_kv_blocks + plan.disk_kv_blocks
    assert plan.sequences == policy.block_size
    asked = (policy.cache[1] * blocks, policy.cache[2] * blocks)
    assert (plan.host_kv_blocks, plan.disk_kv_blocks) == pytest.approx(asked, abs=1)
    assert plan.chunk >= 64


@given(st.floats(0, 0.2), st.floats(0, 1))
@settings(deadline=None, max_examples=10)
def test_device_and_host_hold_the_parts_of_the_weights_that_were_asked_for(on_device, of_the_rest):
    """Less than a tile too little, and never more. Each part of its tier, with room for all."""
    one, on_host = demand(), of_the_rest * (1 - on_device)
    weights = on_device, on_host, 1 - on_device - on_host
    plan = plan_device_memory(one, api.OffloadPolicy(4, weights=weights), 40 * GIB, 400 * GIB)
    total, largest = sum(tile.nbytes for tile in one.tiles), max(tile.nbytes for tile in one.tiles)
    for chosen, share in ((plan.resident, on_device), (plan.pinned, on_host)):
        held = sum(one.tiles[i].nbytes for i in chosen)
        assert share * total - largest - 1 <= held <= share * total


def test_a_sweep_whose_weights_stream_from_disk_keeps_its_cache_there_too():
    """So that more sequences share the reading; where memory holds all weights, none is read."""
    one = demand("facebook/opt-175b")
    plan = plan_device_memory(one, api.OffloadPolicy(64, schedule="sweep"), 16 * GIB, 200 * GIB)
    assert plan.sequences == 64
    assert plan.disk_kv_blocks > 0
    held = plan_device_memory(demand(), api.OffloadPolicy(512, schedule="sweep"), 16 * GIB, 200 * GIB)
    assert held.disk_kv_blocks == 0
    assert len(held.resident | held.pinned) == len(demand().tiles)


def test_refusals_say_what_would_fit():
    one = demand()
    with pytest.raises(api.InfeasibleError, match=r"for 640 sequences of 544 tokens .*; gpu_batch_size \d+ would fit"):
        plan_device_memory(one, api.OffloadPolicy(64, 10, "zigzag"), 16 * GIB, 64 * GIB)
    with pytest.raises(api.InfeasibleError, match="use larger limits"):
        plan_device_memory(one, api.OffloadPolicy(), 700 * MIB, 64 * GIB)


@pytest.mark.parametrize("name", ["gpu_16g", "gpu_4g"])
def test_what_the_device_suites_ask_for_fits_their_limits(name):
    """So that a machine that is lent for minutes is not spent on refusals."""
    suite = config.load_suite(Path(__file__).parents[2] / "suites" / f"{name}.yaml")
    ours = [cell for cell in suite.cells if cell.engine == "offload"]
    assert len(ours) >= 5
    for cell in ours:
        stored = None if cell.policy.weight_bits == 16 else Grouped(4, 64)
        cached = None if cell.policy.kv_bits == 16 else Grouped(4, 64)
        one = demand(cell.model.id, stored, cached, cell.workload.prompt_len, cell.workload.gen_len)
        plan = plan_device_memory(one, cell.policy, cell.limits.device_memory, cell.limits.host_memory)
        assert plan.sequences >= min(16, cell.policy.block_size), (cell.name, plan.note)


@pytest.mark.parametrize("schedule", ["row", "zigzag", "sweep"])
@pytest.mark.parametrize("name", ["facebook/opt-6.7b", "facebook/opt-30b"])
def test_the_engine_has_room_for_what_a_search_finds(name, schedule):
    """Of a T4, as suites/opt30b_t4.yaml has it: CUDA takes its part, and the engine computes in another."""
    memory = int(14.7 * GIB), 204 * GIB
    found = search_for(name, *memory, hardware.load("t4_gcp"), schedule=schedule).policy
    plan = plan_device_memory(demand(name), found, *memory)
    assert found.gpu_batch_size > 1
    assert plan.sequences == found.block_size or schedule == "sweep"


def test_a_search_keeps_the_cache_of_blocks_on_disk_where_that_is_faster():
    """Half of OPT-175B's weights come from there in every pass anyway."""
    memory = int(14.7 * GIB), 204 * GIB
    found = search_for("facebook/opt-175b", *memory, hardware.load("t4_gcp"), schedule="zigzag").policy
    assert found.cache == (0.0, 0.0, 1.0)
    plan = plan_device_memory(demand("facebook/opt-175b"), found, *memory)
    assert plan.sequences == found.block_size > 128


def test_a_search_leaves_out_what_the_disk_cannot_hold():
    job, profile = ("facebook/opt-30b", 12 * GIB, 24 * GIB), hardware.load("t4_gcp")
    assert search_for(*job, profile).tune == "none"
    with pytest.raises(api.InfeasibleError, match="no batch fits"):
        search_for(*job, replace(profile, disk=replace(profile.disk, capacity=8e9)))


SHAPE = api.ModelShape("opt", 2, 64, 256, 4, 4, 16, 512, 128, params_per_layer=49152, params_total=131072)


def small_demand(**changes):
    tiles = tiles_of([Matrix(f"m{i}", 256, 64, "g") for i in range(20)], [Plain("float32")] * 20)
    work = {"small_bytes": 1000, "attention_bytes": (0, 0), "max_sequence": 48, "mean_sequence": 40}
    return replace(MemoryRequest(SHAPE, tiles, Plain("float32"), 4, 0, **work), **changes)


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
    policy = api.OffloadPolicy(schedule=schedule, gpu_batch_size=size, num_gpu_batches=batches, weights=weights)
    wanted = small_demand()
    try:
        plan = plan_host_memory(wanted, policy, mib * MIB)
    except api.InfeasibleError as exc:
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
    policy = api.OffloadPolicy(schedule="zigzag", gpu_batch_size=2000, num_gpu_batches=2)
    with pytest.raises(api.InfeasibleError, match=r"needs \d+ MiB for 4000 sequences of 48 tokens") as caught:
        plan_host_memory(small_demand(), policy, 120 * MIB)
    size = int(re.search(r"gpu_batch_size (\d+) would fit", str(caught.value))[1])
    plan_host_memory(small_demand(), replace(policy, gpu_batch_size=size), 120 * MIB)
    with pytest.raises(api.InfeasibleError):
        plan_host_memory(small_demand(), replace(policy, gpu_batch_size=size + 1), 120 * MIB)
    with pytest.raises(api.InfeasibleError, match="use a larger budget"):
        plan_host_memory(small_demand(), policy, 10 * MIB)


def test_rows_that_are_scored_together_share_the_memory_of_all_batches():
    one, four = (plan_host_memory(small_demand(), api.OffloadPolicy(4, batches, "zigzag"), None) for batches in (1, 4))
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
    plan = plan_host_memory(small_demand(tiles=tiles), api.OffloadPolicy(weights=(0.0, share, 1 - share)), None)
    total = sum(b.nbytes for b in tiles)
    assert abs(sum(tiles[i].nbytes for i in plan.resident) / total - share) <= 0.01


@given(st.floats(0, 1), st.integers(72, 400), st.sampled_from(["row", "sweep"]))
def test_the_part_of_the_cache_on_disk_is_the_one_asked_for_to_a_page(share, mib, schedule):
    policy = api.OffloadPolicy(schedule=schedule, gpu_batch_size=8, cache=(0.0, 1 - share, share))
    plan = plan_host_memory(small_demand(), policy, mib * MIB)
    blocks = plan.kv_blocks + plan.disk_kv_blocks
    assert abs(plan.disk_kv_blocks - share * blocks) <= 1
    assert blocks >= blocks_for(48)


def test_without_a_device_its_tier_is_memory_too():
    both, host = (
        plan_host_memory(small_demand(), api.OffloadPolicy(weights=w), None) for w in ((0.25, 0.25, 0.5), (0, 0.5, 0.5))
    )
    assert both.resident == host.resident


def test_resident_blocks_are_spread_over_the_pass():
    plan = plan_host_memory(small_demand(), api.OffloadPolicy(weights=(0, 0.5, 0.5)), None)
    assert sorted(plan.resident) == list(range(1, 20, 2))
