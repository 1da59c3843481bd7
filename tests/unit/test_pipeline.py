"""One model on several ranks: what is announced, what travels, who did what, and answers that are one process's."""

import itertools
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.memory.kv_blocks import blocks_for
from engines.offload.pipeline import leader, processes
from engines.offload.pipeline.clocks import offset
from engines.offload.pipeline.lane import COMPUTE, SEND, WAIT, Lane, LaneSpan, events, metrics
from engines.offload.pipeline.messages import PassChunk, PassMessage
from engines.offload.pipeline.ranks import Failure, Ranks
from engines.offload.pipeline.stages import equal_stages
from engines.offload.pipeline.wire import Int8Wire, PlainWire
from harness.api import HarnessError, InfeasibleError, TraceEvent
from tests.offload import (
    OTHERS,
    all_greedy,
    answers,
    check_a_killed_rank_is_named,
    exact_score,
    load,
    rank_pids,
    requests_of,
    tiny,
)


@st.composite
def messages(draw):
    batches = []
    for _ in range(draw(st.integers(1, 4))):
        chunks = []
        for _ in range(draw(st.integers(1, 5))):
            count, cached = draw(st.integers(1, 30)), draw(st.integers(0, 60))
            held = blocks_for(count + cached)
            chunks.append(
                PassChunk(count, cached, draw(st.lists(st.integers(0, 1 << 20), min_size=held, max_size=held)))
            )
        batches.append(chunks)
    total = sum(chunk.count for batch in batches for chunk in batch)
    ids = draw(st.lists(st.integers(0, 200_000), min_size=total, max_size=total))
    return PassMessage(batches, ids, [draw(st.lists(st.integers(0, 60), max_size=5)) for _ in batches])


@given(messages())
def test_what_is_announced_is_what_arrives(message):
    assert PassMessage.decoded(message.encoded()) == message


@given(st.integers(0, 60), st.integers(0, 30), st.integers(0, 30), st.integers(1, 5))
def test_groups_share_no_block_and_leave_none(near, lower, last, groups):
    parts = [BlockManager(near + lower + last, lower + last, last, (i, groups)) for i in range(groups)]
    held = [part.allocate(part.num_blocks) for part in parts]
    assert sorted(itertools.chain(*held)) == list(range(near + lower + last))
    assert [sum(column) for column in zip(*(part.num_used for part in parts), strict=True)] == [near, lower, last]
    for part, blocks in zip(parts, held, strict=True):
        part.free(blocks)
        assert part.num_used == (0, 0, 0)
    for sizes in (*zip(*(part.sizes for part in parts), strict=True), [part.num_blocks for part in parts]):
        assert max(sizes) - min(sizes) <= 1, "a group must hold the longest sequence, as group_count has it"


values = st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([0.0, 2.0**-140, 6e4])


@given(st.integers(1, 4), st.integers(1, 150), st.data())
def test_eight_bits_are_off_by_half_a_step_of_their_group_at_most(rows, width, data):
    drawn = data.draw(st.lists(values, min_size=rows * width, max_size=rows * width))
    hidden = torch.tensor(drawn, dtype=torch.float32).view(rows, width)
    wire = Int8Wire(torch.float32)
    raw = wire.packed(hidden)
    assert len(raw) == wire.nbytes(rows, width) == rows * (width + 4 * -(-width // 64))
    found = wire.unpacked(raw, rows, width)
    for first in range(0, width, 64):
        group = hidden[:, first : first + 64]
        step = group.abs().amax(dim=1, keepdim=True).double() / 127
        assert ((found[:, first : first + 64].double() - group.double()).abs() <= step * 0.5001 + 2.0**-126).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_plain_values_travel_bit_by_bit(dtype):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(-1, 8)  # signed zeros and every NaN as well
    hidden = bits.view(dtype)
    wire = PlainWire(dtype)
    raw = wire.packed(hidden)
    assert len(raw) == wire.nbytes(*hidden.shape)
    assert torch.equal(wire.unpacked(raw, *hidden.shape).view(torch.int16), bits)


delays = st.floats(0, 1)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(st.floats(0, 1e5), delays, delays), min_size=1, max_size=9))
def test_a_clock_is_known_to_within_its_error(ahead, exchanges):
    found = offset((at, at + there + ahead, at + there + back) for at, there, back in exchanges)
    assert abs(found.seconds - ahead) <= found.error_s + 1e-9
    assert found.error_s == pytest.approx(min(there + back for _, there, back in exchanges) / 2, abs=1e-9)


def test_a_lane_is_cut_to_the_pass_that_is_kept_and_idle_time_is_what_is_left():
    lane = Lane()
    for kind, start, end in ((COMPUTE, 0.0, 2.0), (WAIT, 2.0, 5.0), (COMPUTE, 5.0, 8.0), (SEND, 8.0, 9.0)):
        lane.add(kind, start, end)
    assert lane.within(1.0, 8.5) == [(COMPUTE, 1, 2), (WAIT, 2, 5), (COMPUTE, 5, 8), (SEND, 8, 8.5)]
    assert metrics(3, lane.busy_s, 12.0) == {"rank3_busy_s": 6, "rank3_idle_s": 6, "rank3_idle_share": 0.5}
    assert lane.seconds == 9
    assert events(3, [LaneSpan(SEND, 8.0, 8.5)], 1.0) == [TraceEvent("send", "rank 3", 7e6, 5e5, 3, 4)]
    lane.clear()
    assert (lane.busy_s, lane.seconds, lane.within(0, 9)) == (0, 0, [])


POLICIES = [
    {"schedule": "sweep", "gpu_batch_size": 4},
    {"schedule": "zigzag", "gpu_batch_size": 2, "num_gpu_batches": 2, "weights": (0.0, 0.3, 0.7)},
    {"schedule": "row", "gpu_batch_size": 3, "cache": (0.0, 0.5, 0.5), "kv_bits": 8},
    {
        "schedule": "sweep",
        "gpu_batch_size": 5,
        "weight_bits": 4,
        "prefill_chunk": 6,
        "nano_batches": "KQV0 O1 UG1 D1 KQV1 O0 UG0 D0",
    },
]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "ranks", "policy"),
    [
        ("opt", 2, POLICIES[0]),
        ("llama", 2, POLICIES[0]),
        pytest.param("llama", 3, POLICIES[1], marks=SLOW),
        pytest.param("opt", 2, POLICIES[2], marks=SLOW),
        pytest.param("llama", 3, POLICIES[3], marks=SLOW),
    ],
    ids=str,
    indirect=["model"],
)
def test_answers_of_a_pipeline_are_those_of_one_process(model, reference, cache, ranks, policy):
    requests = requests_of(7, 6)
    alone, _ = load(model, cache, **policy)
    expected = answers(alone, requests)
    pairs = [((5, 6, 7), (8, 9)), ((11,), tuple(range(12, 40)))]
    scores = alone.score(pairs)
    alone.close()
    engine, report = load(model, cache, pipeline=ranks, **policy)
    assert report.policy.pipeline == ranks
    assert answers(engine, requests) == expected or all_greedy(reference, requests, answers(engine, requests))
    for found, score in zip(engine.score(pairs), scores, strict=True):
        assert found.logprob == pytest.approx(score.logprob, abs=1e-3)
    unfinished = engine.generate(requests)
    next(unfinished)
    unfinished.close()
    tokens = answers(engine, requests)
    assert tokens == expected or all_greedy(reference, requests, tokens), "again, after scores and a run that was ended"
    trace, window = engine.trace(), engine.loaded.timeline.window
    engine.close()
    for rank in range(ranks):
        assert trace.metrics[f"rank{rank}_busy_s"] > 0 and 0 <= trace.metrics[f"rank{rank}_idle_share"] < 1
    assert {(e.cat, e.pid) for e in trace.events if e.pid} == {(f"rank {rank}", rank + 1) for rank in range(ranks)}
    end = 1e6 * (window[1] - window[0])
    assert all(e.ts >= -0.2 and e.ts + e.dur <= end + 0.2 for e in trace.events), "clocks are one: all in the same pass"
    rows = trace.metrics["passes"] * trace.metrics["rows_per_pass"]
    assert trace.metrics["rank1_sent_bytes"] == pytest.approx(rows * 64 * 4), "hidden states in float32"
    assert trace.metrics["rank0_sent_bytes"] == 0, "ids go out with the next pass"
    assert (trace.metrics["rank0_weight_bytes_read"] > 0) == ("weights" in policy)
    if "weight_bits" not in policy and "kv_bits" not in policy:
        assert scores[0].logprob == pytest.approx(exact_score(reference, *pairs[0]).logprob, abs=1e-3)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_scores_use_no_block_that_another_rank_lacks(model, cache, monkeypatch):
    """A rank of more layers has fewer: what lies behind its last block is another layer's, or nobody's."""
    agree, announced = Ranks.agree, set()
    monkeypatch.setattr(Ranks, "agree", lambda self, own: replace(agree(self, own), blocks=12))
    encoded = PassMessage.encoded

    def seen(message):
        announced.update(*(chunk.block_table for batch in message.batches for chunk in batch))
        return encoded(message)

    monkeypatch.setattr(PassMessage, "encoded", seen)
    engine, _ = load(model, cache, pipeline=2, schedule="sweep", gpu_batch_size=2)
    assert engine.loaded.cache.num_blocks > 12
    pairs = [((1, i), tuple(range(10, 50))) for i in range(5)]  # of six blocks each
    engine.score(pairs)
    answers(engine, requests_of(5, 6))
    engine.close()
    assert announced == set(range(12))


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_blocks_in_use_are_those_of_all_groups(model, cache):
    engine, _ = load(model, cache, pipeline=2, schedule="sweep", gpu_batch_size=4)
    for request in requests_of(4, 20):
        engine.submit(request)
    engine.step()
    engine.step()
    stats = engine.stats()
    assert stats.running == 4 and sum(stats.kv_blocks_used.values()) >= 4
    assert stats.kv_blocks_total == {"host": sum(share.blocks.num_blocks for share in engine._runner.shares)}
    while engine.pending():
        engine.step()
    assert sum(engine.stats().kv_blocks_used.values()) == 0
    engine.close()


@pytest.mark.parametrize("error", [HarnessError("no"), InfeasibleError("too much", {"host": 7.0})])
def test_why_a_rank_failed_arrives_as_what_it_is(error):
    """A job looks for shorter lines only where memory is what is short."""
    store = HashStore()
    store.set("failed/2", Failure.of(error).encoded())
    with pytest.raises(HarnessError) as told:  # while it waits for another rank, which loads on
        Ranks(3, store, {1: Mock(), 2: Mock()}).wait_for("loaded/1", 1, 5.0)
    assert type(told.value) is type(error) and str(told.value) == f"rank 2 of 3: {error}"
    assert getattr(told.value, "lacking", None) == getattr(error, "lacking", None)


def log_probability(reference, layer, context, token, change):
    """Of a token after a context where `change` is applied to what enters a layer; and that, and the gradient by it."""
    entered = []

    def enter(_, args):
        entered.append(change(args[0].detach()).requires_grad_())
        return (entered[0], *args[1:])

    hook = reference.model.layers[layer].register_forward_pre_hook(enter)
    try:
        logits = reference(torch.tensor([context])).logits[0, -1]
    finally:
        hook.remove()
    found = logits.log_softmax(-1)[token]
    found.backward()
    return found.item(), entered[0].detach()[0], entered[0].grad[0]


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_eight_bits_between_ranks_change_log_probabilities_by_no_more_than_their_steps(model, reference, cache):
    """To first order by at most the sum, over all values that travel, of half a step times the derivative; a quarter
    more for the rest."""
    pairs = [((5, 6, 7), (8,)), ((11,), (12,)), (tuple(range(40, 70)), (9,))]
    engine, report = load(model, cache, pipeline=2, wire_bits=8, schedule="sweep", gpu_batch_size=4)
    scores = engine.score(pairs)
    trace = engine.trace()
    engine.close()
    assert report.policy.wire_bits == 8
    assert trace.metrics["rank1_sent_bytes"] == sum(len(context) for context, _ in pairs) * (64 + 4)
    layer = equal_stages(model.shape, 2).stages[1].last
    wire = Int8Wire(torch.float32)

    def travelled(hidden):
        return wire.unpacked(wire.packed(hidden[0]), *hidden.shape[1:])[None]

    for (context, (token,)), score in zip(pairs, scores, strict=True):
        exact, hidden, gradient = log_probability(reference, layer, context, token, lambda hidden: hidden)
        bound = (gradient.abs() * hidden.abs().amax(dim=1, keepdim=True) / 254).sum().item()
        assert 1e-5 < abs(score.logprob - exact) <= 1.25 * bound
        expected, *_ = log_probability(reference, layer, context, token, travelled)
        assert score.logprob == pytest.approx(expected, abs=0.1 * bound), "what a sum in another order rounds elsewhere"


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_rank_that_would_only_slow_the_others_holds_nothing(model, reference, cache, monkeypatch):
    """Three ranks of one host that do not know that they are: they measure, and compare their clocks."""
    monkeypatch.setattr(Ranks, "alike", lambda *_: False)
    monkeypatch.setattr(Ranks, "shares_clock", lambda *_: False)
    measured = leader.rank_rates

    def with_a_slow_one(machines, told, request):
        slow = replace(told[0], seconds=tuple((rows, 1000 * seconds) for rows, seconds in told[0].seconds))
        return measured(machines, [told[0], slow, told[0]], request)

    monkeypatch.setattr(leader, "rank_rates", with_a_slow_one)
    engine, report = load(model, cache, pipeline=3, schedule="sweep", gpu_batch_size=4)
    assert any("none: rank 1, as with layers on every rank" in note for note in report.notes)
    requests = requests_of(5, 6)
    tokens = answers(engine, requests)
    trace = engine.trace()
    engine.close()
    assert all_greedy(reference, requests, tokens)
    assert {e.cat for e in trace.events if e.pid} == {"rank 0", "rank 2"}
    assert "rank1_busy_s" not in trace.metrics
    assert abs(trace.metrics["rank2_clock_offset_s"]) <= trace.metrics["rank2_clock_error_s"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_other_architectures_are_cut_too(kind, tmp_path, cache):
    model = tiny(tmp_path / kind, kind, **OTHERS[kind] | {"bos_token_id": 1, "eos_token_id": 2})
    reference = transformers.AutoModelForCausalLM.from_pretrained(model.path).eval()
    engine, _ = load(model, cache, pipeline=2, schedule="sweep", gpu_batch_size=3)
    requests = requests_of(11, 4)
    tokens = answers(engine, requests)
    engine.close()
    assert all_greedy(reference, requests, tokens)


@pytest.mark.slow
def test_a_rank_that_dies_is_named_and_nothing_is_left(model, cache):
    engine, _ = load(model, cache, pipeline=3, schedule="sweep", gpu_batch_size=2)
    ranks = rank_pids()
    assert len(ranks) == 2
    check_a_killed_rank_is_named(engine, ranks[0])


def test_more_ranks_than_layers_are_refused_before_any_is_started(model, cache, monkeypatch):
    monkeypatch.setattr("engines.offload.pipeline.leader.leading", lambda *_: pytest.fail("started"))
    with pytest.raises(HarnessError, match="4 stages for 3 layers"):
        load(model, cache, pipeline=4)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ("versions", r"rank 1 of 2 has engine .*; rank 0 has engine 0, torch 1, transformers 1: install the same"),
        ("no checkpoint", "rank 1 of 2: there is no checkpoint in .*nowhere: put the same files there"),
        ("another checkpoint", "rank 1 of 2: .*other has another checkpoint than rank 0's host"),
    ],
)
def test_a_rank_whose_host_differs_is_refused_before_it_loads(model, cache, tmp_path, monkeypatch, differs, words):
    """Only the leader's process knows of the changes here."""
    if differs == "versions":
        monkeypatch.setattr(processes, "versions", lambda: "engine 0, torch 1, transformers 1")
    else:
        other = tiny(tmp_path / "other", "llama", hidden_size=32).path
        path = other if differs == "another checkpoint" else str(tmp_path / "nowhere")
        tell = Ranks.tell
        monkeypatch.setattr(
            Ranks, "tell", lambda self, request, measure: tell(
                self, replace(request, model=replace(request.model, path=path)), measure
            ),
        )  # fmt: skip
    with pytest.raises(HarnessError, match=words):
        load(model, cache, pipeline=2)
    assert rank_pids() == []


@pytest.mark.slow
def test_a_rank_that_cannot_load_says_why(model, cache):
    with pytest.raises(HarnessError, match=r"rank 1 of 2: offload needs|offload needs"):
        load(model, cache, 20 << 20, pipeline=2, schedule="row", gpu_batch_size=64)
    assert rank_pids() == []
