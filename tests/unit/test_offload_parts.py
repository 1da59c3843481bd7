"""The parts of the offload engine, each against what it must keep: layout, stream, schedule, memory, timeline."""

import dataclasses
import itertools
import random
import re
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.offload.executor import _Joint, _Need
from engines.offload.gemm import by_torch
from engines.offload.layout import ALIGN, Matrix, blocks_of
from engines.offload.pages import page_bytes, pages_for
from engines.offload.schedule import pass_ops, turns_of
from engines.offload.storage import Grouped, Plain
from engines.offload.throttle import Throttle
from engines.offload.tiers import SLACK_BYTES, Demand, place
from engines.offload.timeline import Timeline
from engines.offload.transfer import BlockStream
from harness.api import (
    HarnessError,
    InfeasibleError,
    ModelShape,
    OffloadPolicy,
)

SHAPE = ModelShape("opt", 2, 64, 256, 4, 4, 16, 512, 128, params_per_layer=49152, params_total=131072)


# ------------------------------------------------------------------------------------------------ products


def test_a_product_in_many_blocks_is_rounded_as_one():
    """In bfloat16: a sum that is rounded after each of 32 blocks of columns is four times as far from the truth."""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*size).bfloat16() for size in ((64, 2048), (96, 2048), (96,)))
    exact = x.double() @ weight.double().T + bias.double()
    joint = _Joint([_Need("m", x[:24], bias), _Need("m", x[24:], bias)], 96)
    for block in blocks_of([Matrix("m", 96, 2048, "f")], [Plain("bfloat16")], 64 * 96):
        joint.add(by_torch, block, weight[:, block.start : block.stop].contiguous())

    def off(found):
        return (found.double() - exact).pow(2).mean().sqrt()

    assert off(torch.cat(joint.parts)) < 1.6 * off(torch.addmm(bias, x, weight.T))


# ------------------------------------------------------------------------------------------------ layout


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400), st.sampled_from(["a", "b"])), min_size=1, max_size=5),
    st.sampled_from([Plain("bfloat16"), Plain("float32"), Grouped(4, 64), Grouped(3, 32, across=True)]),
    st.integers(1, 20_000),
)
def test_blocks_tile_every_matrix_and_never_overlap_on_disk(sizes, stored, block_values):
    matrices = [Matrix(f"m{i}", rows, columns, group) for i, (rows, columns, group) in enumerate(sizes)]
    blocks = blocks_of(matrices, [stored] * len(matrices), block_values)
    for matrix in matrices:
        covered = torch.zeros(matrix.rows, matrix.columns, dtype=torch.int)
        for block in (b for b in blocks if b.matrix == matrix.name):
            part = covered[block.start : block.stop] if block.axis == 0 else covered[:, block.start : block.stop]
            assert tuple(part.shape) == block.shape
            assert block.nbytes == stored.matrix_bytes(*block.shape) > 0
            part += 1
        assert (covered == 1).all()
    ends: dict[str, int] = {}
    for block in blocks:
        assert block.offset % ALIGN == 0
        assert block.offset >= ends.get(block.file, 0)
        ends[block.file] = block.offset + block.nbytes


# ------------------------------------------------------------------------------------------------ stream


@pytest.fixture(params=["neighbours", "scattered"])
def files(tmp_path, request):
    """Ten blocks with known bytes in two files: those of one after the other, or alternating."""
    group = {"neighbours": lambda i: i // 5, "scattered": lambda i: i % 2}[request.param]
    matrices = [Matrix(f"m{i}", 50, 30 + i, f"group{group(i)}") for i in range(10)]
    blocks = blocks_of(matrices, [Plain("float32")] * 10)
    for i, block in enumerate(blocks):
        with (tmp_path / block.file).open("r+b" if (tmp_path / block.file).exists() else "wb") as file:
            file.seek(block.offset)
            file.write(bytes([i + 1]) * block.span)
    return tmp_path, blocks


def stream_of(files, slots=3):
    return BlockStream(files[0], files[1], slots, Timeline(), Throttle(None))


def test_a_stream_gives_every_block_in_order_pass_after_pass(files):
    stream = stream_of(files)
    for _ in range(5):
        for i, block in enumerate(files[1]):
            data = stream.next(block)
            assert data.shape == (block.nbytes,)
            assert (data == i + 1).all()
            stream.release()
    stream.close()
    stream.close()


@pytest.mark.parametrize("slots", range(1, 12))
def test_a_stream_of_any_depth_goes_on(files, slots):
    stream = stream_of(files, slots)
    assert stream.measure() > 0
    for i, block in enumerate(files[1] * 3):
        assert (stream.next(block) == i % 10 + 1).all()
        stream.release()
    stream.close()


def test_a_stream_reads_no_further_than_its_slots(files):
    stream = stream_of(files, slots=4)
    stream.measure()
    assert stream.bytes_read == sum(b.span for b in files[1][:4])
    first = stream.next(files[1][0])
    stream.next(files[1][1])
    time.sleep(0.1)
    assert (first == 1).all(), "a block stays until it is released"
    assert stream.bytes_read == sum(b.span for b in files[1][:4])
    stream.release()
    stream.next(files[1][2])
    stream.close()


def test_what_is_skipped_is_not_waited_for_and_never_mistaken(files):
    """Some of it announced, some not; over many passes, so that slots are used for other blocks again."""
    rng = random.Random(0)
    stream = stream_of(files)
    for _ in range(30):
        needed = {i for i in range(len(files[1])) if rng.random() < 0.4}
        stream.leave_out([i for i in range(len(files[1])) if i not in needed and rng.random() < 0.7])
        for i, block in enumerate(files[1]):
            if i not in needed:
                stream.skip()
                continue
            assert (stream.next(block) == i + 1).all()
            stream.release()
    stream.close()


def test_what_is_left_out_is_not_read(files):
    stream = stream_of(files)
    stream.measure()
    count = len(files[1])
    for _ in range(50):
        stream.leave_out(list(range(1, count)))
        stream.next(files[1][0])
        stream.release()
        for _ in range(1, count):
            stream.skip()
    assert stream.bytes_read < 50 * sum(b.span for b in files[1]) / 2
    stream.close()


def test_a_cut_file_reaches_the_caller_with_file_and_offset(files):
    folder, blocks = files
    last = max((b for b in blocks if b.file == "group0.bin"), key=lambda b: b.offset)
    with (folder / last.file).open("r+b") as file:
        file.truncate(last.offset + 100)
    stream = stream_of(files)
    with pytest.raises(HarnessError, match=rf"group0.bin ends at byte {last.offset + 100}, {last.matrix} reaches"):
        for block in blocks:
            stream.next(block)
            stream.release()
    stream.close()


def test_a_pass_that_was_broken_off_does_not_shift_the_next(files):
    stream = stream_of(files)
    for block in files[1][:7]:
        stream.next(block)
        stream.release()
    stream.next(files[1][7])
    with pytest.raises(HarnessError, match="the stream has"):
        stream.next(files[1][0])
    stream.align()
    assert (stream.next(files[1][0]) == 1).all()
    stream.close()


def test_a_reader_that_fails_in_any_way_is_heard(files, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("engines.offload.transfer.os.preadv", broken)
    stream = stream_of(files)
    with pytest.raises(HarnessError, match=r"reading group[01].bin at byte \d+ \(m\d\): Input/output error"):
        stream.next(files[1][0])
    stream.close()


def test_closing_wakes_whoever_waits(files, monkeypatch):
    gate = threading.Event()
    real = BlockStream._fetch
    monkeypatch.setattr(BlockStream, "_fetch", lambda self, *a: (gate.wait(5), real(self, *a)))
    stream = stream_of(files)
    threading.Timer(0.1, lambda: (gate.set(), stream.close())).start()
    with pytest.raises(HarnessError, match="closed"):
        for block in files[1] * 100:
            stream.next(block)
            stream.release()


# ------------------------------------------------------------------------------------------------ schedule


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 6))
def test_a_pass_loads_each_block_once_and_multiplies_it_once_for_all_batches(blocks, batches, slots):
    streamed, last = [on_disk for on_disk, _ in blocks], [ends for _, ends in blocks]
    ops = pass_ops(streamed, last, batches, slots)
    loads = [op.block for op in ops if op.kind == "load"]
    assert loads == [i for i, on_disk in enumerate(streamed) if on_disk]
    assert [op.block for op in ops if op.kind == "multiply"] == list(range(len(streamed)))
    for k in range(batches):
        runs = [op.block for op in ops if op.kind == "run" and op.batch == k]
        assert runs == [-1, *(i for i, ends in enumerate(last) if ends)]
    loaded_at = {}
    for i, op in enumerate(ops):
        assert all(0 <= j < i for j in op.after), "what must be done before stands before"
        if op.kind == "load":
            loaded_at[op.block] = i
        if op.kind == "multiply" and streamed[op.block]:
            assert loaded_at[op.block] in op.after
        if op.kind == "multiply" and op.block and last[op.block - 1]:
            ready = {ops[j].batch for j in op.after if ops[j].kind == "run"}
            assert ready == set(range(batches)), "a product waits until every batch has come to it"
    held, most = set(), 0
    for op in ops:  # run in order, a slot is taken by a load and freed by the product
        if op.kind == "load":
            held.add(op.block)
            most = max(most, len(held))
        elif op.kind == "multiply":
            held.discard(op.block)
    assert most <= slots


def test_a_load_waits_for_the_product_that_frees_its_slot():
    ops = pass_ops([True] * 4, [False, True] * 2, batches=3, slots=2)
    loads = [op for op in ops if op.kind == "load"]
    assert [op.after for op in loads[:2]] == [(), ()]
    freeing = [ops[op.after[0]] for op in loads[2:]]
    assert [(op.kind, op.block) for op in freeing] == [("multiply", 0), ("multiply", 1)]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=6),
    st.lists(st.integers(1, 3), min_size=6, max_size=6),
    st.integers(2, 4),
    st.integers(4, 20),
    st.randoms(use_true_random=False),
)
def test_batches_take_turns_around_attention(layers, sizes, batches, slots, rng):
    """Layers of some matrices before an attention and after it: order, dependencies and slots, for any number."""
    groups, attends = [], []
    for i, (before, after) in enumerate(layers):
        groups += [f"layer-{i}"] * before
        attends.append(len(groups))
        groups += [f"layer-{i}"] * after
    groups.append("outside")
    blocks = [rng.choice(sizes) for _ in groups]
    firsts = [sum(blocks[:i]) for i in range(len(blocks) + 1)]
    spans = [range(a, b) for a, b in itertools.pairwise(firsts)]
    last = [i + 1 in firsts for i in range(firsts[-1])]
    streamed = [rng.random() < 0.7 for _ in last]
    turns = turns_of(spans, groups, attends, slots)
    ops = pass_ops(streamed, last, batches, slots, turns)
    assert [op.block for op in ops if op.kind == "load"] == [i for i, on_disk in enumerate(streamed) if on_disk]
    alone = {block for turn in turns for block in (*turn.before, *turn.after)}
    for k in range(batches):
        mine = [op.block for op in ops if op.kind == "multiply" and op.batch in (-1, k)]
        assert mine == list(range(len(last))), "each batch meets each block once, in order"
        assert len([op for op in ops if op.kind == "attend" and op.batch == k]) == len(turns)
    assert {op.block for op in ops if op.kind == "multiply" and op.batch >= 0} == alone
    held, most = set(), 0
    for i, op in enumerate(ops):
        assert all(0 <= j < i for j in op.after)
        if op.kind == "load":
            held.add(op.block)
            most = max(most, len(held))
        elif op.kind == "multiply" and op.batch in (-1, batches - 1):
            held.discard(op.block)
        elif op.kind == "attend":
            following = next(j for j in range(i + 1, len(ops)) if ops[j].kind == "run" and i in ops[j].after)
            between = [o for o in ops[i + 1 : following] if o.kind == "multiply"]
            assert all(o.batch != op.batch for o in between), "what runs beside an attention is the others'"
    assert most <= slots


# ------------------------------------------------------------------------------------------------ memory


def demand(**changes):
    blocks = blocks_of([Matrix(f"m{i}", 256, 64, "g") for i in range(20)], [Plain("float32")] * 20)
    return dataclasses.replace(
        Demand(SHAPE, blocks, Plain("float32"), 4, 0, small=1000, attention=(0, 0), max_sequence=48, mean_sequence=40),
        **changes,
    )


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
        plan = place(wanted, policy, mib * MIB)
    except InfeasibleError as exc:
        assert "the budget is" in str(exc)
        if schedule == "sweep":
            assert mib < 80, "one sequence fits in little"
        return
    held = sum(wanted.blocks[i].nbytes for i in plan.resident)
    rows = plan.sequences + batches * plan.chunk
    activations = rows * (SHAPE.hidden + SHAPE.ffn) * 4 + plan.sequences * SHAPE.vocab * 4
    ring = plan.slots * max(b.span for b in wanted.blocks)
    cache = plan.pages * page_bytes(SHAPE, Plain("float32"))
    assert cache + held + ring + activations + SLACK_BYTES <= mib * MIB
    assert plan.pages >= pages_for(48)
    if schedule == "sweep":
        assert 1 <= plan.sequences <= size
        assert plan.pages >= plan.sequences * pages_for(40)
    else:
        assert plan.sequences == size * batches
        assert plan.pages >= plan.sequences * pages_for(48)
    if share is not None:
        total = sum(b.nbytes for b in wanted.blocks)
        assert abs(held / total - share) <= 1 / len(wanted.blocks)


def test_a_budget_below_what_is_needed_is_refused_with_numbers_and_the_nearest_policy():
    policy = OffloadPolicy(schedule="zigzag", gpu_batch_size=2000, num_gpu_batches=2)
    with pytest.raises(InfeasibleError, match=r"needs \d+ MiB for 4000 sequences of 48 tokens") as caught:
        place(demand(), policy, 120 * MIB)
    size = int(re.search(r"gpu_batch_size (\d+) would fit", str(caught.value))[1])
    place(demand(), dataclasses.replace(policy, gpu_batch_size=size), 120 * MIB)
    with pytest.raises(InfeasibleError):
        place(demand(), dataclasses.replace(policy, gpu_batch_size=size + 1), 120 * MIB)
    with pytest.raises(InfeasibleError, match="use a larger budget"):
        place(demand(), policy, 10 * MIB)


def test_rows_that_are_scored_together_share_the_memory_of_all_batches():
    one = place(demand(), OffloadPolicy(schedule="zigzag", gpu_batch_size=4), None)
    four = place(demand(), OffloadPolicy(schedule="zigzag", gpu_batch_size=4, num_gpu_batches=4), None)
    assert four.scored_rows == one.scored_rows


@given(
    st.sampled_from(
        [(768, 3072, 12, 50272), (2048, 8192, 24, 50272), (4096, 11008, 32, 32000), (576, 1536, 30, 49152)]
    ),
    st.sampled_from([Plain("bfloat16"), Plain("float32"), Grouped(4, 64), Grouped(8, 128, across=True)]),
    st.floats(0, 1),
)
def test_the_part_of_the_weights_in_memory_is_the_one_asked_for_to_a_point(sizes, stored, share):
    """Of models from 125 million to 7 billion parameters."""
    hidden, ffn, layers, vocab = sizes
    square = [(hidden, hidden)] * 4 + [(ffn, hidden), (hidden, ffn)]
    matrices = [Matrix(f"{i}.{j}", *size, f"layer-{i}") for i in range(layers) for j, size in enumerate(square)]
    matrices.append(Matrix("head", vocab, hidden, "outside"))
    blocks = blocks_of(matrices, [stored] * (len(matrices) - 1) + [Plain("bfloat16")])
    plan = place(demand(blocks=blocks), OffloadPolicy(weights=(0.0, share, 1 - share)), None)
    total = sum(b.nbytes for b in blocks)
    assert abs(sum(blocks[i].nbytes for i in plan.resident) / total - share) <= 0.01


@given(st.floats(0, 1), st.integers(70, 400), st.sampled_from(["row", "sweep"]))
def test_the_part_of_the_cache_on_disk_is_the_one_asked_for_to_a_page(share, mib, schedule):
    policy = OffloadPolicy(schedule=schedule, gpu_batch_size=8, cache=(0.0, 1 - share, share))
    plan = place(demand(), policy, mib * MIB)
    pages = plan.pages + plan.disk_pages
    assert abs(plan.disk_pages - share * pages) <= 1
    assert pages >= pages_for(48)


def test_without_a_device_its_tier_is_memory_too():
    both, host = (place(demand(), OffloadPolicy(weights=w), None) for w in ((0.25, 0.25, 0.5), (0, 0.5, 0.5)))
    assert both.resident == host.resident


def test_resident_blocks_are_spread_over_the_pass():
    plan = place(demand(), OffloadPolicy(weights=(0, 0.5, 0.5)), None)
    assert sorted(plan.resident) == list(range(1, 20, 2))


# ------------------------------------------------------------------------------------------------ timeline


def test_the_time_of_overlapping_loads_counts_once():
    timeline = Timeline()
    for start, end in ((1.0, 3.0), (5.0, 6.0), (0.0, 2.0)):
        timeline.add("load", "a", start, end)
    timeline.end_pass(1)
    assert timeline.trace().metrics["disk_busy_s"] == 4.0


def test_the_fullest_pass_is_kept():
    timeline = Timeline()
    for rows in (3, 9, 2):
        timeline.add("compute", f"{rows} rows", 0.0, 1.0)
        timeline.end_pass(rows)
    assert [s.name for s in timeline.kept] == ["9 rows"]
    assert timeline.passes == 3


def test_the_kept_pass_becomes_chrome_trace_events():
    timeline = Timeline()
    for i in range(4):
        timeline.add("load", "w0" if i < 3 else "w1", 10.0 + i, 11.0 + i)
    timeline.add("wait", "stall", 13.0, 13.25)
    timeline.add("wait", "stall", 13.5, 13.75)
    timeline.add("compute", "w0", 12.0, 13.0)
    timeline.end_pass(5)
    trace = timeline.trace()
    found = [(e.cat, e.name, e.ts, e.dur) for e in trace.events]
    assert found == [
        ("load", "w0", 0, 3e6),
        ("load", "w1", 3e6, 1e6),
        ("wait", "stall", 3e6, 2.5e5),
        ("wait", "stall", 3.5e6, 2.5e5),
        ("compute", "w0", 2e6, 1e6),
    ]
    assert {e.ph for e in trace.events} == {"X"}
    tasks = {name: value for name, value in trace.metrics.items() if name.startswith("task_") and value}
    assert tasks == {"task_load_weights_s": 4, "task_products_s": 1, "task_waiting_s": 0.5}
    assert {name: value for name, value in trace.metrics.items() if not name.startswith("task_")} == {
        "passes": 1, "rows_per_pass": 5, "disk_busy_s": 4, "disk_wait_s": 0.5,
        "shared_prompt_tokens": 0, "disk_hidden": pytest.approx(0.875)
    }  # fmt: skip
