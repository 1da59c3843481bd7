"""What the offload engine refuses before any work, what it leaves behind, and what it is after a failure."""

import gc
import weakref

import pytest
import torch

from engines.offload.engine import OffloadEngine
from harness import api
from tests.offload import (
    COMMON,
    GOOD,
    VOCAB,
    answers,
    tiny,
)


def test_closing_frees_what_was_resident(model, cache, load):
    engine, _ = load(model, cache, weights=(0.0, 1.0, 0.0))
    held = weakref.ref(next(iter(engine.loaded.resident.values())))
    gc.disable()
    try:
        engine.close()
        assert held() is None
    finally:
        gc.enable()


def test_a_limit_on_threads_ends_with_the_engine(model, cache, load):
    before = torch.get_num_threads()
    engine = OffloadEngine()
    engine.load(model, api.OffloadPolicy(), api.HardwareLimits(threads=1), api.Job(cache, cache, 64, 64))
    assert torch.get_num_threads() == 1
    engine.close()
    assert torch.get_num_threads() == before


def test_a_budget_that_cannot_hold_a_sequence_is_refused_before_loading(model, cache, load):
    for schedule in ("row", "zigzag", "sweep"):
        with pytest.raises(api.InfeasibleError, match=r"offload needs \d+ MiB .*the budget is 1 MiB"):
            load(model, cache / "never", budget=1 << 20, schedule=schedule)
    assert not (cache / "never" / "offload").exists()


@pytest.mark.parametrize(
    "policy",
    [{"cpu_attention": True}, {"nano_batches": 2}, {"num_gpu_batches": 2}, {"weight_bits": 4, "group_size": 48}],
)
def test_policies_it_cannot_honour_are_refused(model, cache, policy, load):
    with pytest.raises(api.UnsupportedError):
        load(model, cache, **policy)


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        ("bloom", {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "bloom"),
        ("falcon", COMMON | {"num_hidden_layers": 2}, "falcon"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
         "'dynamic' rotary scaling"),
    ],
)  # fmt: skip
def test_unsupported_architectures_are_refused_before_loading(kind, config, reason, tmp_path, load):
    model = tiny(tmp_path / kind, kind, **config)
    with pytest.raises(api.UnsupportedError, match=reason):
        load(model, tmp_path / "cache")
    assert not (tmp_path / "cache" / "offload").exists()


@pytest.mark.parametrize(
    ("prompt", "new", "words"), [((), 4, "the prompt is empty"), ((5,) * 60, 60, "can never fit a cache")]
)
def test_requests_that_cannot_be_run_are_named_before_any_work(model, cache, prompt, new, words, load):
    engine, _ = load(model, cache, schedule="sweep", max_sequence=32)
    good = api.GenerationRequest("good", (5, 6), api.SamplingParams(2))
    with pytest.raises(api.HarnessError, match=rf"request bad: .*{words}"):
        engine.generate([good, api.GenerationRequest("bad", prompt, api.SamplingParams(new))])
    assert engine.stats().passes == 0


@pytest.mark.parametrize("schedule", ["row", "zigzag", "sweep"])
def test_a_generation_that_is_given_up_leaves_the_engine_as_it_was(model, cache, schedule, load):
    engine, _ = load(model, cache, schedule=schedule, gpu_batch_size=2, weights=(0.0, 0.0, 1.0))
    expected = answers(engine, GOOD)
    begun = engine.generate(GOOD)
    next(begun)
    with pytest.raises(api.HarnessError, match="one generation at a time"):
        next(engine.generate(GOOD))
    del begun
    assert answers(engine, GOOD) == expected


def test_a_pass_that_fails_leaves_the_engine_as_it_was(model, cache, monkeypatch, load):
    engine, _ = load(model, cache, schedule="sweep", gpu_batch_size=2, weights=(0.0, 0.0, 1.0))
    expected = answers(engine, GOOD)

    def broken(*_):
        raise MemoryError("in the middle of a pass")

    with monkeypatch.context() as patch:
        patch.setattr("engines.offload.kv_cache.attention.PackedAttention.attend", broken)
        with pytest.raises(MemoryError):
            list(engine.generate(GOOD))
    assert answers(engine, GOOD) == expected


@pytest.mark.parametrize("schedule", ["row", "sweep"])
def test_no_requests_give_no_results(model, cache, schedule, load):
    engine, _ = load(model, cache, schedule=schedule)
    assert list(engine.generate([])) == []
    assert engine.score([]) == []


def test_an_engine_that_is_closed_says_so(model, cache, load):
    engine, _ = load(model, cache)
    engine.close()
    engine.close()
    with pytest.raises(api.HarnessError, match="no model loaded"):
        engine.generate(GOOD)
    OffloadEngine().close()
