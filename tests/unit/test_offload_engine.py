"""The offload engine says what transformers says, whatever the schedule, the batch, the placement and the cuts."""

import dataclasses
import random

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.offload.executor import Executor
from engines.offload.memory.kv_blocks import blocks_for
from harness import api
from tests.offload import (
    CONFIGS,
    GOOD,
    all_greedy,
    answers,
    exact_score,
    greedy,
    load_and_answer,
    logits_of,
    policies,
    prepare,
    requests_of,
    same_by_the_near_tie_rule,
    tiny,
    words,
)
from tests.stories import stories260k, vocabulary


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), count=st.integers(1, 12), policy=policies())
def test_greedy_output_is_transformers_own(model, reference, cache, seed, count, policy, load):
    engine, _ = load(model, cache, **policy)
    held = engine.stats().num_kv_blocks
    requests = [r for r in requests_of(seed, count) if blocks_for(len(r.prompt) + r.sampling.max_tokens) <= held]
    results = {r.id: r for r in engine.generate(requests)}
    assert results.keys() == {r.id for r in requests}
    for request in requests:
        result = results[request.id]
        eos = reference.generation_config.eos_token_id
        assert same_by_the_near_tie_rule(reference, request, result.tokens)
        if result.finish_reason == "length":
            assert len(result.tokens) == request.sampling.max_tokens
        else:
            assert result.tokens[-1] == eos and not request.sampling.ignore_eos
        assert list(result.token_times_s) == sorted(result.token_times_s)
        assert 0 <= result.start_s <= result.token_times_s[0]
        assert len(result.token_times_s) == len(result.tokens)


@pytest.mark.parametrize("schedule", ["row", "zigzag", "sweep"])
def test_the_end_of_a_sequence_ends_it(model, reference, cache, schedule, load):
    """The reference's own third token is made the end of sequence."""
    prompt = (7, 8, 9, 10)
    third = greedy(reference, prompt, 5, min_new_tokens=5)[2]
    engine, _ = load(model, cache, schedule=schedule, gpu_batch_size=2)
    engine.loaded.meta_model.eos = (third,)
    [result] = engine.generate([api.GenerationRequest("a", prompt, api.SamplingParams(max_tokens=20))])
    assert result.finish_reason == "stop"
    assert result.tokens[-1] == third
    assert len(result.tokens) <= 3


@pytest.mark.parametrize("kind", CONFIGS)
def test_sixteen_bit_weights_give_the_same_on_every_schedule(kind, tmp_path, cache):
    model, requests = tiny(tmp_path / kind, kind, torch.bfloat16), requests_of(3, 8, eos=False)
    policy = {"gpu_batch_size": 3, "compute_dtype": "float32"}
    found = []
    for schedule, batches, chunk in (("row", 1, None), ("zigzag", 2, 7), ("sweep", 1, 5), ("sweep", 1, None)):
        policy |= {"schedule": schedule, "num_gpu_batches": batches, "prefill_chunk": chunk}
        tokens, report = load_and_answer(model, cache, requests, **policy)
        found.append(tokens)
        assert report.compute_dtype == "float32"
    assert all(tokens == found[0] for tokens in found)


def test_sampling_does_not_depend_on_who_shares_the_pass(model, cache):
    requests = [
        api.GenerationRequest(f"s{i}", (9, 10 + i, 11), api.SamplingParams(8, temperature=0.8, top_k=40, seed=i))
        for i in range(6)
    ]
    found = [
        load_and_answer(model, cache, requests, schedule=schedule, gpu_batch_size=size, num_gpu_batches=batches)[0]
        for schedule, size, batches in (("sweep", 6, 1), ("row", 1, 1), ("zigzag", 2, 2))
    ]
    assert found[0] == found[1] == found[2]


def test_logits_are_within_one_in_ten_thousand(model, reference, cache, monkeypatch, load):
    """One packed pass over ragged prompts against one plain pass for each."""
    rng = random.Random(5)
    pairs = [(words(rng, n), words(rng, 4)) for n in (0, 1, 9, 30)]
    engine, _ = load(model, cache, schedule="sweep", gpu_batch_size=4)
    seen, run = [], Executor.run
    monkeypatch.setattr(Executor, "run", lambda *args: seen.extend(run(*args)) or seen[-len(args[1]) :])
    scores = engine.score(pairs)
    begin = reference.generation_config.bos_token_id
    rows = []
    for (context, continuation), score in zip(pairs, scores, strict=True):
        rows.append(logits_of(reference, context or (begin,), continuation))
        expected = exact_score(reference, context or (begin,), continuation)
        assert score.logprob == pytest.approx(expected.logprob, rel=1e-4)
        assert score.is_greedy == expected.is_greedy
    found, exact = torch.cat(seen), torch.cat(rows)
    order = [torch.cdist(row[None], found).argmin().item() for row in exact]
    assert sorted(order) == list(range(len(exact)))
    error = (found[order] - exact).abs().max() / exact.abs().max()
    assert error < 1e-4


def test_a_packed_pass_computes_no_padding(model, cache, monkeypatch, load):
    engine, _ = load(model, cache, schedule="sweep", gpu_batch_size=8)
    rows, run = [], Executor.run
    monkeypatch.setattr(Executor, "run", lambda *args: rows.extend(len(b.ids) for b in args[1]) or run(*args))
    requests = requests_of(1, 6, eos=True)
    requests = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, ignore_eos=True)) for r in requests]
    list(engine.generate(requests))
    assert sum(rows) == sum(len(r.prompt) + r.sampling.max_tokens - 1 for r in requests)


def test_zigzag_reads_a_quarter_of_what_row_reads(model, cache, load):
    requests = [api.GenerationRequest(f"r{i}", (5, 6, 7), api.SamplingParams(6, ignore_eos=True)) for i in range(8)]
    read = {}
    for schedule, batches in (("row", 1), ("zigzag", 4)):
        engine, report = load(
            model, cache, schedule=schedule, gpu_batch_size=2, num_gpu_batches=batches, weights=(0.0, 0.0, 1.0)
        )
        list(engine.generate(requests))
        stats = engine.stats()
        largest = max(tile.span for tile in engine.loaded.tiles)
        assert report.weights_by_tier[1] == 0
        read[schedule] = stats.passes * stats.pass_weight_bytes
        ahead = stats.weight_bytes_read - read[schedule]
        assert 0 <= ahead <= stats.ring_slots * largest, "what is read beyond the passes is read ahead"
    assert read["zigzag"] * 4 == read["row"]


def test_the_report_says_what_was_really_placed(model, cache, load):
    _, report = load(model, cache, weights=(0.0, 0.5, 0.5), gpu_batch_size=2, num_gpu_batches=3, schedule="zigzag")
    device, host, disk = report.weights_by_tier
    assert device == 0
    assert report.policy.weights == pytest.approx((0, host / (host + disk), disk / (host + disk)))
    assert report.block_size == 6
    assert report.compute_dtype == "float32"


def test_what_a_policy_gives_the_device_is_host_memory_where_there_is_no_device(model, cache, load):
    placed = {"weights": (0.3, 0.2, 0.5), "cache": (0.5, 0.5, 0.0), "activations": (0.75, 0.0, 0.25)}
    _, report = load(model, cache, **placed, gpu_batch_size=2)
    policy = report.policy
    assert policy.weights[0] == report.weights_by_tier[0] == 0
    assert sum(policy.weights) == pytest.approx(1)
    assert policy.weights[1] == pytest.approx(0.5, abs=0.2), "whole tiles"
    assert (policy.cache, policy.activations) == ((0, 1, 0), (0, 0.75, 0.25))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_activations_on_disk_change_nothing(model, reference, cache, share, load):
    batches = {"schedule": "zigzag", "gpu_batch_size": 2, "num_gpu_batches": 3}
    engine, report = load(model, cache, activations=(0.0, 1 - share, share), **batches)
    requests = requests_of(4, 9)
    tokens = answers(engine, requests)
    stats = engine.stats()
    assert report.policy.activations[2] == share
    # whole rows of small batches
    assert stats.activation_rows_on_disk / stats.activation_rows == pytest.approx(share, abs=0.1)
    assert all_greedy(reference, requests, tokens)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "policy", [{}, {"kv_bits": 8, "cache": (0.0, 0.5, 0.5)}, {"weights": (0.0, 0.3, 0.7)}], ids=str
)
def test_nano_batches_change_nothing(model, cache, policy, overlap, load):
    requests = requests_of(5, 9)
    found = []
    for nano in (1, 2, 3):
        engine, report = load(
            model, cache, schedule="sweep", gpu_batch_size=6, nano_batches=nano, nano_overlap=overlap, **policy
        )
        assert report.policy.nano_batches == nano
        found.append(answers(engine, requests))
        events = engine.trace().events
    assert found[0] == found[1] == found[2]
    assert any(e.cat == "attention" for e in events)


def test_without_overlap_nothing_is_read_ahead(model, reference, cache, load):
    more = {"weights": (0.0, 0.0, 1.0), "cache": (0.0, 0.0, 1.0)}
    engine, _ = load(model, cache, schedule="zigzag", gpu_batch_size=2, num_gpu_batches=2, overlap=False, **more)
    requests = requests_of(6, 4)
    tokens = answers(engine, requests)
    spans = engine.loaded.timeline.kept
    assert all_greedy(reference, requests, tokens)
    loads, products = ([s for s in spans if s.lane == lane] for lane in ("load", "compute"))
    assert loads
    assert not any(a.start_s < b.end_s and b.start_s < a.end_s for a in loads for b in products)


def test_without_a_compiler_torch_does_all_of_it(model, reference, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    requests = requests_of(3, 6)
    policy = {"schedule": "sweep", "gpu_batch_size": 6, "prefill_chunk": 9}
    tokens, report = load_and_answer(model, tmp_path, requests, **policy)
    assert any("no-such-compiler" in note for note in report.notes)
    assert all_greedy(reference, requests, tokens)


def test_scores_do_not_depend_on_how_prompts_are_cut(model, cache, load):
    rng = random.Random(2)
    pairs = [(words(rng, n), words(rng, m)) for n, m in ((20, 10), (3, 30), (0, 5))]
    found = []
    for schedule, chunk in (("sweep", None), ("sweep", 3), ("row", 7)):
        engine, _ = load(model, cache, schedule=schedule, gpu_batch_size=2, prefill_chunk=chunk)
        found.append([s.logprob for s in engine.score(pairs)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


def test_half_precision_checkpoints_run(tmp_path, cache):
    model, found = tiny(tmp_path / "m", "llama", torch.float16), []
    for dtype in ("float32", "float16"):
        tokens, report = load_and_answer(model, cache, GOOD, schedule="sweep", gpu_batch_size=4, compute_dtype=dtype)
        found.append(tokens)
        assert report.compute_dtype == dtype
    assert all(found[0][i][0] == found[1][i][0] for i in found[0]), "the first tokens are far from ties"


def test_stories260k_tells_the_story_that_transformers_tells(tmp_path, cache):
    folder = stories260k(tmp_path / "stories")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    pieces = vocabulary()
    requests = [
        api.GenerationRequest(f"p{i}", p, api.SamplingParams(max_tokens=120))
        for i, p in enumerate([(1,), (1, 403), (1, 410)])
    ]
    results, _ = load_and_answer(prepare(folder), cache, requests, schedule="sweep", gpu_batch_size=3, max_sequence=128)
    texts = []
    for request in requests:
        texts.append("".join(pieces[t] for t in results[request.id]))
        assert results[request.id] == greedy(reference, request.prompt, 120)
    assert "Once upon a time, there was a little girl named" in texts[0]
