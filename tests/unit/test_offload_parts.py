"""The parts of the offload engine, each against what it must hold to: layout, schedule, timeline."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.offload.kernels import panels
from engines.offload.kernels.gemm import torch_gemm
from engines.offload.kernels.tile_pool import TilePool
from engines.offload.memory.layout import ALIGN, Matrix, matrix_spans, model_tiles, tiles_of
from engines.offload.memory.rows import padded_rows
from engines.offload.memory.storage import Grouped, Panels, Plain
from engines.offload.pass_ops import ALL, AttentionOverlap, attention_overlaps, pass_ops
from engines.offload.scheduled_chunk import ActiveSequence, ScheduledChunk, split
from engines.offload.timeline import BETWEEN, Timeline
from engines.offload.weights.gemm import GemmBackend, padded_output
from engines.offload.weights.joint_gemm import GemmRequest, JointGemm
from harness.api import NanoOrder


def test_a_product_in_many_blocks_is_rounded_as_one():
    """In bfloat16: a sum that is rounded after each of 32 tiles of columns is four times as far from the truth."""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*size).bfloat16() for size in ((64, 2048), (96, 2048), (96,)))
    exact = x.double() @ weight.double().T + bias.double()
    backend = GemmBackend("torch", "bfloat16", torch_gemm, 0, Plain("bfloat16"))
    joint = JointGemm([GemmRequest(["m"], x[:24], [bias]), GemmRequest(["m"], x[24:], [bias])], [96], backend)
    for tile in tiles_of([Matrix("m", 96, 2048, "f")], [Plain("bfloat16")], 64 * 96):
        joint.add(tile, weight[:, tile.start : tile.stop].contiguous(), torch_gemm)

    def off(found):
        return (found.double() - exact).pow(2).mean().sqrt()

    assert off(torch.cat([rows for (rows,) in joint.parts])) < 1.6 * off(torch.addmm(bias, x, weight.T))


@pytest.fixture
def uninitialized_is_nan():
    """What torch.empty gives."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_product_has_nothing_of_what_lies_beside_its_operands(uninitialized_is_nan):
    """oneDNN's kernels for AMX read past the end of rows whose columns are no multiple of their tiles."""
    backend = GemmBackend("torch", "bfloat16", torch_gemm, 0, Plain("bfloat16"))
    weight = torch.randn(96, 160).bfloat16()
    joint = JointGemm([GemmRequest(["m"], torch.randn(30, 160).bfloat16(), [None])], [96], backend)
    for tile in tiles_of([Matrix("m", 96, 160, "f")], [Plain("bfloat16")], 53 * 96):
        joint.add(tile, weight[:, tile.start : tile.stop].contiguous(), torch_gemm)
    assert joint.parts[0][0].isfinite().all()
    output = padded_output(3, 10, weight)
    assert output.shape == (3, 10) and output.as_strided((2, output.stride(0) - 10), output.stride(), 10).eq(0).all()


@pytest.mark.parametrize("way", ["torch", "panels"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_joint_product_is_each_batch_s_own_once_its_tiles_are_done(cache, way, biased):
    """Of rows of one matrix in several tiles, for some batches and not for others."""
    pool = TilePool(cache, 2)
    dtype = getattr(torch, pool.dtype)
    stored = Panels() if way == "panels" else Plain(pool.dtype)
    backend = GemmBackend(way, pool.dtype, torch_gemm, 0, stored, pool=pool if way == "panels" else None)
    weight, bias = torch.randn(100, 40).bfloat16(), torch.randn(100).to(dtype) if biased else None
    inputs = [torch.randn(rows, 40).to(dtype) for rows in (3, 5)]
    requests = [GemmRequest(["m"], inputs[0], [bias]), None, GemmRequest(["m"], inputs[1], [bias])]
    joint = JointGemm(requests, [100], backend)
    tiles = tiles_of([Matrix("m", 100, 40, "f")], [stored], 40 * 32)
    kept = [weight[tile.start : tile.stop].to(dtype) for tile in tiles]
    kept = [panels.pack(part.bfloat16()) for part in kept] if way == "panels" else kept
    assert [joint.add(*pair, torch_gemm) for pair in zip(tiles, kept, strict=True)] == list(range(len(tiles)))
    joint.wait()
    assert all(joint.is_done(number) for number in range(len(tiles)))
    assert joint.matrix == "m" and joint.parts[1] is None
    for x, (part,) in zip(inputs, joint.parts[::2], strict=True):
        exact = x.double() @ weight.double().T + (bias.double() if biased else 0)
        torch.testing.assert_close(part.double(), exact, rtol=2**-7, atol=2**-5)
    joint.close()
    pool.close()


def test_a_product_of_no_rows_is_done_at_once(cache):
    """No batch of a pass wants logits."""
    pool = TilePool(cache, 2)
    backend = GemmBackend("panels", pool.dtype, torch_gemm, 0, Panels(), pool=pool)
    joint = JointGemm([GemmRequest(["m"], torch.empty(0, 8, dtype=getattr(torch, pool.dtype)), [None])], [16], backend)
    (tile,) = tiles_of([Matrix("m", 16, 8, "f")], [Panels()])
    assert joint.add(tile, torch.empty(0), torch_gemm) == 0 and joint.is_done(0)
    joint.wait()
    joint.close()
    assert joint.parts[0][0].shape == (0, 16)


of_matrices = given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400), st.sampled_from(["a", "b"])), min_size=1, max_size=5),
    st.sampled_from(
        [
            Plain("bfloat16"),
            Plain("float32"),
            Panels(),
            Panels(Grouped(3, 64)),
            Grouped(4, 64),
            Grouped(3, 32, group_axis=0),
        ]
    ),
    st.integers(1, 20_000),
)


@of_matrices
def test_a_devices_tiles_are_rows_that_begin_at_even_addresses(sizes, stored, tile_values):
    matrices = [Matrix(f"m{i}", rows, columns, group) for i, (rows, columns, group) in enumerate(sizes)]
    tiles = model_tiles(matrices, stored, stored, tile_values)
    assert {tile.axis for tile in tiles} == {0}
    assert all(tile.start % 64 == 0 for tile in tiles)
    for matrix in matrices:
        assert sum(tile.shape[0] for tile in tiles if tile.matrix == matrix.name) == matrix.rows


@of_matrices
def test_blocks_tile_every_matrix_and_never_overlap_on_disk(sizes, stored, tile_values):
    matrices = [Matrix(f"m{i}", rows, columns, group) for i, (rows, columns, group) in enumerate(sizes)]
    tiles = tiles_of(matrices, [stored] * len(matrices), tile_values)
    for matrix in matrices:
        covered = torch.zeros(matrix.rows, matrix.columns, dtype=torch.int)
        for tile in (b for b in tiles if b.matrix == matrix.name):
            part = covered[tile.start : tile.stop] if tile.axis == 0 else covered[:, tile.start : tile.stop]
            assert tuple(part.shape) == tile.shape
            assert tile.nbytes == stored.matrix_bytes(*tile.shape) > 0
            part += 1
        assert (covered == 1).all()
    assert [tile.index for tile in tiles] == list(range(len(tiles))), "a tile's index is its place in the order of use"
    ends: dict[str, int] = {}
    for tile in tiles:
        assert tile.offset % ALIGN == 0
        assert tile.offset >= ends.get(tile.file, 0)
        ends[tile.file] = tile.offset + tile.nbytes


def tiles_of_op(op):
    """The tiles that an operation multiplies."""
    return range(op.tile, op.tile + op.count) if op.kind == "multiply" else range(0)


def order(ops, kind, tile, batch):
    """Where in a pass an operation stands that is for `batch` or for all."""
    return next(
        i for i, op in enumerate(ops)
        if op.kind == kind and tile in (tiles_of_op(op) or (op.tile,)) and op.batch in (ALL, batch)
    )  # fmt: skip


def most_slots(ops, batches):
    """The most tiles that are in the ring at once: a load takes a slot, the last product with the tile frees it."""
    held, most = set(), 0
    for op in ops:
        if op.kind == "load":
            held.add(op.tile)
            most = max(most, len(held))
        elif op.kind == "multiply" and op.batch in (ALL, batches - 1):
            held.discard(op.tile)
    return most


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3)), min_size=1, max_size=15), st.integers(1, 4))
def test_a_pass_loads_each_tile_once_and_multiplies_it_once_for_all_batches(matrices, batches):
    starts = list(itertools.accumulate((tiles for _, tiles in matrices), initial=0))
    spans = [range(a, b) for a, b in itertools.pairwise(starts)]
    streamed = [on_disk for on_disk, tiles in matrices for _ in range(tiles)]
    ops = pass_ops(streamed, spans, batches)
    loads = [op.tile for op in ops if op.kind == "load"]
    assert loads == [i for i, on_disk in enumerate(streamed) if on_disk]
    assert [tile for op in ops for tile in tiles_of_op(op)] == list(range(len(streamed)))
    assert all(op.count == 1 or not any(streamed[tile] for tile in tiles_of_op(op)) for op in ops)
    whole = sum(not on_disk for on_disk, _ in matrices)
    assert len([op for op in ops if op.kind == "multiply"]) == len(loads) + whole, "a resident matrix is one operation"
    for k in range(batches):
        resumes = [op.tile for op in ops if op.kind == "resume" and op.batch == k]
        assert resumes == [-1, *(span[-1] for span in spans)]
        for before, span in zip([range(-1, 0), *spans], spans, strict=False):
            ready, multiplied = order(ops, "resume", before[-1], k), order(ops, "multiply", span[0], k)
            assert ready < multiplied, "a product waits until every batch has come to it"
            assert order(ops, "multiply", span[-1], k) < order(ops, "resume", span[-1], k)
    for tile in loads:
        assert order(ops, "load", tile, 0) < order(ops, "multiply", tile, 0)
    assert most_slots(ops, batches) <= 1, "without overlap a tile is multiplied as soon as it is loaded"


def test_a_load_comes_after_the_product_that_frees_its_slot():
    ops = pass_ops([True] * 4, [range(2), range(2, 4)], batches=3)
    moves = [(op.kind, op.tile) for op in ops if op.kind in ("load", "multiply")]
    assert moves == [(kind, tile) for tile in range(4) for kind in ("load", "multiply")]


def test_matrices_are_runs_of_tiles():
    tiles = tiles_of([Matrix(f"m{i}", 8, 8, "f") for i in range(3)], [Plain("float32")] * 3, 16)
    spans = matrix_spans(tiles)
    assert [i for span in spans for i in span] == list(range(len(tiles)))
    assert [{tiles[i].matrix for i in span} for span in spans] == [{"m0"}, {"m1"}, {"m2"}]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=6),
    st.lists(st.integers(1, 3), min_size=6, max_size=6),
    st.integers(2, 4),
    st.integers(4, 20),
    st.randoms(use_true_random=False),
)
def test_batches_overlap_attention_with_the_products_of_others(layers, sizes, batches, slots, rng):
    """Layers of some matrices before an attention and after it: order, dependencies and slots, for any number."""
    groups, attends = [], []
    for i, (before, after) in enumerate(layers):
        groups += [f"layer-{i}"] * before
        attends.append(len(groups))
        groups += [f"layer-{i}"] * after
    groups.append("outside")
    tiles = [rng.choice(sizes) for _ in groups]
    firsts = [sum(tiles[:i]) for i in range(len(tiles) + 1)]
    spans = [range(a, b) for a, b in itertools.pairwise(firsts)]
    streamed = [rng.random() < 0.7 for _ in range(firsts[-1])]
    overlaps = attention_overlaps(spans, groups, attends, streamed, slots)
    ops = pass_ops(streamed, spans, batches, overlaps)
    assert [op.tile for op in ops if op.kind == "load"] == [i for i, on_disk in enumerate(streamed) if on_disk]
    alone = {tile for overlap in overlaps for tile in (*overlap.before, *overlap.after)}
    for k in range(batches):
        mine = [tile for op in ops if op.batch in (ALL, k) for tile in tiles_of_op(op)]
        assert mine == list(range(len(streamed))), "each batch is multiplied with each tile once, in order"
        assert len([op for op in ops if op.kind == "attend" and op.batch == k]) == len(overlaps)
        for before, span in zip([range(-1, 0), *spans], spans, strict=False):
            assert order(ops, "resume", before[-1], k) < order(ops, "multiply", span[0], k)
    assert {tile for op in ops if op.batch >= 0 for tile in tiles_of_op(op)} == alone
    for i, op in enumerate(ops):
        if op.kind == "attend":
            resumed = next(j for j in range(i, len(ops)) if ops[j].kind == "resume" and ops[j].batch == op.batch)
            assert ops[resumed].tile == op.tile
            beside = [o for o in ops[i + 1 : resumed] if o.kind == "multiply"]
            assert all(o.batch != op.batch for o in beside), "what runs beside an attention is the others'"
    assert most_slots(ops, batches) <= slots


#: Two layers: queries and keys, attention, its output and a feed-forward matrix; then the head. Two tiles each.
LAYERS = ["layer0"] * 4 + ["layer1"] * 4 + ["outside"]
TILES = [range(2 * i, 2 * i + 2) for i in range(9)]


def test_what_is_multiplied_around_an_attention_begins_with_its_layer_and_ends_with_its_output():
    first = AttentionOverlap(range(4), range(4, 6), (range(6, 8),))
    second = AttentionOverlap(range(8, 12), range(12, 14), (range(14, 16),))
    assert attention_overlaps(TILES, LAYERS, [2, 6], [False] * 18, 0) == [first, second]
    streamed = [True] * 4 + [False] * 4 + [True] * 3 + [False] * 7  # four tiles of one layer, three of the other
    for slots, expected in ((3, []), (4, [second]), (5, [first, second])):
        assert attention_overlaps(TILES, LAYERS, [2, 6], streamed, slots) == expected, "one slot is left for the others"
    assert attention_overlaps(TILES, LAYERS, [0, 9], [False] * 18, 9) == [], "nothing before, and nothing after"
    assert attention_overlaps(TILES, LAYERS, [2, 3], [False] * 18, 9) == [replace(first, rest=())], (
        "one is after and before"
    )
    assert attention_overlaps(TILES, LAYERS, [2, 4], [False] * 18, 9)[1].before == range(6, 8)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 6))
def test_nano_batches_have_about_as_many_rows_each(rows, count):
    """Each part but for half of a chunk at either end; chunks keep their order and none is divided."""
    batch = [ScheduledChunk(ActiveSequence([0] * n, 1), n) for n in rows]
    parts = split(batch, count)
    assert [chunk for part in parts for chunk in part] == batch
    assert all(parts) and len(parts) <= min(count, len(batch))
    fair = sum(rows) / min(count, len(batch))
    for part in parts:
        sizes = [chunk.count for chunk in part]
        assert sum(sizes) <= fair + (sizes[0] + sizes[-1]) / 2


@pytest.mark.parametrize(
    ("rows", "count", "parts"),
    [([1] * 6, 2, [3, 3]), ([1] * 6, 3, [2, 2, 2]), ([6, 1, 1, 1, 1, 1, 1], 2, [1, 6]), ([1, 1, 4], 2, [2, 1]),
     ([5], 3, [1]), ([1, 1], 4, [1, 1]), ([1, 9], 2, [1, 1])],
)  # fmt: skip
def test_how_rows_divide_over_nano_batches(rows, count, parts):
    batch = [ScheduledChunk(ActiveSequence([0] * n, 1), n) for n in rows]
    assert list(map(len, split(batch, count))) == parts


@given(st.integers(1, 50), st.lists(st.integers(2, 400), max_size=6), st.integers(2, 4), st.booleans())
def test_each_nano_batch_has_its_part_of_what_the_host_attends_for(decoding, prompts, count, ordered):
    batch = [ScheduledChunk(ActiveSequence([0] * n, 1), n) for n in [1] * decoding + prompts]
    order = NanoOrder.parse("KQV0 KQV1 O0 O1 UG0 D0 cut=0.25") if ordered and count == 2 else None
    parts = split(batch, count, order, cpu_attention=True)
    assert sorted(map(id, (chunk for part in parts for chunk in part))) == sorted(map(id, batch))
    singles = [sum(chunk.count == 1 for chunk in part) for part in parts]
    if decoding >= count and order is None:
        assert max(singles) - min(singles) <= 1
    if order is not None and decoding >= 4:
        assert abs(singles[0] - decoding / 4) <= 1
    for part in parts:
        assert [chunk for chunk in batch if any(chunk is one for one in part)] == part, "in their order"


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


def test_what_runs_between_products_is_timed_without_what_lies_inside_it():
    timeline = Timeline()
    timeline.add("compute", BETWEEN, 0.0, 10.0)
    for start in (2.0, 5.0):
        timeline.add("compute", "w", start, start + 1)
    timeline.add("attention", "layer 0", 8.0, 9.0)
    tasks = timeline.end_pass(1).tasks
    assert {task: s for task, s in tasks.items() if s} == {"task_products": 2, "task_attention": 1, "task_other": 7}


def test_products_in_16_bits_have_few_numbers_of_rows() -> None:
    """Each number costs oneDNN half a megabyte for good."""
    sizes = {rows: padded_rows(rows, 2) for rows in range(1, 1025)}
    assert all(rows <= size <= max(32, 1.97 * rows) for rows, size in sizes.items())
    assert len(set(sizes.values())) <= 25
    assert all(padded_rows(rows, 4) == rows for rows in (1, 7, 33, 300))
