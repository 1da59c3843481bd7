"""Orders of products in nano-batches: what they may be, and that the engine runs them and answers as without."""

import itertools

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engines.offload.executor import Executor
from engines.offload.pass_ops import attention_overlaps, pass_ops, tiles_held
from engines.offload.refusals import refuse
from engines.offload.scheduled_chunk import ActiveSequence, ScheduledChunk, split
from harness import api
from harness.api import NanoOrder
from tests.nano_orders import check_order, nano_orders
from tests.offload import OTHERS, all_greedy, answers, load_and_answer, requests_of, tiny

#: NanoFlow's numbers: four nano-batches around attention, two of the other products; one half is a layer ahead.
NANOFLOW = "KQV0 KQV1 O1 UG1 D1 KQV2 KQV3 O0 UG0 D0"
SWEEP = {"schedule": "sweep", "gpu_batch_size": 8}
#: Answers without nano-batches, by number of the policy that they were found with.
ALONE = {}


@given(nano_orders(), st.integers(1, 4))
def test_an_order_runs_each_product_once_and_in_turn(order, layers):
    assert NanoOrder.parse(str(order)) == order
    check_order(list(order.over_layers(layers)), order)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("many", "'many' is no number, auto, or word of an order"),
        ("2", "'2' is no number"),
        ("", "each part of KQV once"),
        ("KQV0 O0 UG0 D0", "two or more"),
        ("KQV1 KQV0 O0 UG0 D0", "in order"),
        ("KQV0 KQV1 O0 O0 UG0 D0", "each part of O once"),
        ("KQV0 KQV1 O0 D0", "each part of UG once, from UG0 on"),
        ("KQV0 KQV1 KQV2 O0 O1 UG0 D0", "2 parts of O do not divide 3 nano-batches"),
        ("KQV0 O0 KQV1 UG0 D0", "nano-batch 0 would not run KQV, O, UG, D one after the other"),
        ("KQV0 KQV1 UG0 O0 D0", "nano-batch 0 would not run"),
        ("O0 UG0 D0 O1 UG1 KQV0 KQV1 D1", "nano-batch 1 would not run"),
        ("KQV0 KQV1 O0 UG0 D0 cut=1.5", "'cut=1.5' is no number"),
        ("KQV0 KQV1 O0 UG0 D0 cut=1", "cut is a fraction between 0 and 1"),
        ("KQV0 KQV1 KQV2 O0 UG0 D0 cut=0.4", "3 is odd"),
        ("KQV0 KQV1 O0 UG0 D0 attention=0.0", "attention one above 0"),
    ],
)
def test_an_order_that_cannot_run_is_one_line(text, said):
    with pytest.raises(api.HarnessError, match=r"policy\.nano_batches: ") as raised:
        api.OffloadPolicy(schedule="sweep", nano_batches=text).validate()
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_orders_are_refused_where_they_have_no_effect(tmp_path):
    with pytest.raises(api.HarnessError, match="leave one out"):
        api.OffloadPolicy(schedule="sweep", nano_batches=NANOFLOW, nano_overlap=False).validate()
    order = api.OffloadPolicy(schedule="sweep", nano_batches=f"{NANOFLOW} attention=0.5")
    with pytest.raises(api.UnsupportedError, match=r"set options\.attention_units"):
        refuse(order, api.HardwareLimits(device_memory=1 << 30), None)
    mixture = tiny(tmp_path, "mixtral", **OTHERS["mixtral"])
    with pytest.raises(api.UnsupportedError, match="give the order one UG0 and one D0"):
        refuse(order, api.HardwareLimits(), mixture)


@given(nano_orders(), st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=5), st.randoms())
def test_the_operations_of_a_pass_follow_the_order(order, layers, rng):
    """Layers of some matrices before attention and behind its output, some of them on disk: every batch is multiplied
    with each tile once, tiles are loaded and given up in their order, and attention runs beside others' products."""
    groups, attends = [], []
    for i, (before, rest) in enumerate(layers):
        attends.append(len(groups) + before)
        groups += [f"layer-{i}"] * (before + 1 + rest)
    groups.append("outside")
    firsts = list(itertools.accumulate((rng.randint(1, 3) for _ in groups), initial=0))
    spans = [range(a, b) for a, b in itertools.pairwise(firsts)]
    streamed = [rng.random() < 0.5 for _ in range(firsts[-1])]
    overlaps = attention_overlaps(spans, groups, attends, streamed, slots=1000)
    assert len(overlaps) == len(layers)
    count = order.nano_batches
    ops = pass_ops(streamed, spans, count, overlaps, order)
    multiplied = [op for op in ops if op.kind == "multiply"]
    for k in range(count):
        mine = [tile for op in multiplied if op.includes(k) for tile in range(op.tile, op.tile + op.count)]
        assert mine == list(range(len(streamed)))
        resumed = [op.tile for op in ops if op.kind == "resume" and op.batch == k]
        expected = [-1]
        for i, span in enumerate(spans):
            expected += [span[-1]] * (2 if i + 1 in attends else 1)
        assert resumed == expected, "a batch runs on after each matrix, and after its attention"
    assert [op.tile for op in ops if op.kind == "load"] == [i for i, on_disk in enumerate(streamed) if on_disk]
    last = [op.tile for op in multiplied if op.last]
    assert last == sorted(last) and len(last) == len({op.tile for op in multiplied}), "slots are freed in order"
    assert tiles_held(ops) <= sum(streamed)
    attending = set()
    for op in ops:
        if op.kind == "attend":
            attending.add(op.batch)
        elif op.kind == "resume" and op.batch in attending:
            attending.discard(op.batch)
        elif op.kind == "multiply":
            assert not any(op.includes(k) for k in attending)
    # of two products that are there in every layer, each follows the order
    words = {overlap.before.start: (i, "KQV") for i, overlap in enumerate(overlaps)}
    words |= {overlap.after.start: (i, "O") for i, overlap in enumerate(overlaps)}
    found = [(words[op.tile], op.batch if op.batch >= 0 else 0) for op in multiplied if op.tile in words]
    planned = order.over_layers(len(layers))
    assert found == [((layer, p[0]), order.batches(p).start) for p, layer in planned if p[0] in ("KQV", "O")]


def test_fewer_nano_batches_than_an_order_has_overlap_attention_only():
    overlaps = attention_overlaps([range(i, i + 1) for i in range(5)], ["a"] * 4 + ["outside"], [1], [False] * 5, 1)
    arguments = [False] * 5, [range(i, i + 1) for i in range(5)]
    order = NanoOrder.parse(NANOFLOW)
    for count in (1, 2, 3):
        assert pass_ops(*arguments, count, overlaps, order) == pass_ops(*arguments, count, overlaps)
    assert pass_ops(*arguments, 4, overlaps, order) != pass_ops(*arguments, 4, overlaps)


@pytest.mark.parametrize(
    ("count", "text", "sizes"),
    [(10, "KQV0 KQV1 O0 UG0 D0 cut=0.4", [4, 6]), (10, f"{NANOFLOW} cut=0.4", [2, 2, 3, 3]), (8, NANOFLOW, [2] * 4),
     (3, f"{NANOFLOW} cut=0.4", [1, 1, 1])],
)  # fmt: skip
def test_halves_are_as_large_as_the_cut_says(count, text, sizes):
    order = NanoOrder.parse(text)
    batch = [ScheduledChunk(ActiveSequence([0], 1), 1) for _ in range(count)]
    assert list(map(len, split(batch, order.nano_batches, order))) == sizes


@pytest.mark.parametrize("model", ["llama"], indirect=True)
@settings(max_examples=2, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(orders=st.lists(nano_orders(), min_size=3, max_size=3))
def test_answers_in_any_order_are_those_without_nano_batches(model, reference, cache, load, orders):
    """Weights on disk in part; keys and values of eight bits on disk too; and activations beside weights of four."""
    requests = requests_of(5, 9)
    policies = (
        {"weights": (0.0, 0.3, 0.7)},
        {"kv_bits": 8, "cache": (0.0, 0.5, 0.5)},
        {"activations": (0.0, 0.5, 0.5), "weight_bits": 4, "weights": (0.0, 0.0, 1.0)},
    )
    for number, (order, policy) in enumerate(zip(orders, policies, strict=True)):
        engine, report = load(model, cache, nano_batches=str(order), **SWEEP, **policy)
        assert report.policy.nano_batches == str(order)
        found = answers(engine, requests)
        engine.close()
        if number == 0:
            assert all_greedy(reference, requests, found)
        if number not in ALONE:
            ALONE[number], _ = load_and_answer(model, cache, requests, **SWEEP, **policy)
        assert found == ALONE[number]


@pytest.mark.parametrize(
    ("kind", "order"),
    [("opt", f"{NANOFLOW} cut=0.4 attention=0.5"), ("gpt2", NANOFLOW), ("gemma2", NANOFLOW),
     ("mixtral", "KQV0 KQV1 KQV2 KQV3 O0 O1 UG0 D0")],
)  # fmt: skip
def test_other_architectures_run_orders(kind, order, tmp_path, cache):
    """Biases, transposed matrices, windows, and experts, which are for all nano-batches at once."""
    model = tiny(tmp_path / kind, kind, **OTHERS.get(kind, {}))
    requests = requests_of(3, 8)
    alone, found = (load_and_answer(model, cache, requests, nano_batches=n, weights=(0.0, 0.5, 0.5), **SWEEP)[0]
                    for n in (1, order))  # fmt: skip
    assert alone == found


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_one_half_of_the_batch_is_a_layer_ahead(model, cache, load, monkeypatch):
    """What the executor multiplies in a pass of four nano-batches is NanoFlow's order, product by product."""
    products = []
    multiply = Executor._requests

    def requests(self, matrix, op, batches):
        if len(batches) == 4:
            products.append((matrix, tuple(k for k in range(4) if op.includes(k))))
        return multiply(self, matrix, op, batches)

    monkeypatch.setattr(Executor, "_requests", requests)
    engine, _ = load(model, cache, nano_batches=NANOFLOW, **SWEEP)
    some = [api.GenerationRequest(f"r{i}", (7, 8 + i), api.SamplingParams(2, ignore_eos=True)) for i in range(8)]
    assert len(answers(engine, some)) == 8
    names = {"q_proj": "KQV", "o_proj": "O", "gate_proj": "UG", "down_proj": "D"}
    found = []
    for matrix, batches in products:
        name = next((names[part] for part in matrix.split(".") if part in names), None)
        if name:
            found.append((int(matrix.split(".")[2]), name, batches))
    order = NanoOrder.parse(NANOFLOW)
    expected = [(layer, p[0], tuple(order.batches(p))) for p, layer in order.over_layers(3)]
    assert len(found) >= len(expected) and found[: len(expected)] == expected
    ahead = found.index((1, "KQV", (0,))), found.index((0, "D", (2, 3)))
    assert ahead[0] < ahead[1]


def test_an_order_that_would_fill_the_ring_overlaps_attention_only(tmp_path, cache):
    model = tiny(tmp_path, "llama", intermediate_size=2048)
    order = "KQV0 O0 UG0 D0 KQV1 O1 UG1 D1"  # which keeps a layer until the second half has passed through it
    requests = requests_of(4, 6)
    (alone, _), (found, report) = (
        load_and_answer(model, cache, requests, nano_batches=n, weights=(0.0, 0.0, 1.0), **SWEEP) for n in (1, order)
    )
    assert alone == found
    assert report.policy.nano_batches == 2
    assert any("nano-batches overlap attention only" in note for note in report.notes)
