"""The offload engine takes requests while it runs: whoever shares its passes, each gets what it gets alone."""

import itertools
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.offload.engine import OffloadEngine
from engines.offload.executor import Executor
from engines.offload.pass_model import LatencyBudget, PassModel
from engines.offload.running_batch import RunningBatch
from harness import api
from tests.offload import VOCAB, answers, with_kernels, words

pytestmark = pytest.mark.parametrize("model", ["llama"], indirect=True)
POLICIES = {
    "sweep": {"schedule": "sweep", "gpu_batch_size": 3, "prefill_chunk": 7},
    "zigzag": {"schedule": "zigzag", "gpu_batch_size": 2, "num_gpu_batches": 2},
    "disk": {"schedule": "sweep", "gpu_batch_size": 3, "cache": (0.0, 0.5, 0.5), "weights": (0.0, 0.0, 1.0)},
}

OPTIONS = {"sweep": {"admission": "average"}}


def loaded(model, cache, policy, longest=64, **options):
    """An engine whose answers depend on nothing but the request."""
    engine = OffloadEngine(**options)
    job = api.Job(cache, with_kernels(cache), longest, longest, reproducible=True)
    engine.load(model, api.OffloadPolicy(**policy), api.HardwareLimits(), job)
    return engine


def request_of(number):
    """Some begin alike; some want log-probabilities, of these some of the prompt too."""
    rng = random.Random(number)
    prompt = (*((7,) * 18 if number % 2 else ()), *words(rng, rng.randint(1, 20)))
    sampling = api.SamplingParams(
        rng.randint(1, 12), ignore_eos=number % 3 > 0, logprobs=2 if number > 4 else None, prompt_logprobs=number > 6
    )
    return api.GenerationRequest(f"r{number}", prompt, sampling)


def likelihoods(result):
    """Their last bits depend on how many rows of logits a pass computes."""
    return [value.logprob for value in (*result.prompt_logprobs, *result.logprobs)]


def used(engine):
    return sum(engine.stats().kv_blocks_used.values())


def drained(engine):
    events = []
    while engine.pending():
        events += engine.step()
    return events


@pytest.mark.parametrize("name", POLICIES)
def test_a_prompt_s_log_probabilities_are_the_reference_s(model, reference, cache, name):
    requests = [request_of(number) for number in range(7, 10)]
    engine = loaded(model, cache, POLICIES[name])
    for result in engine.generate([*requests, *(request_of(number) for number in range(5))]):
        request = next((request for request in requests if request.id == result.id), None)
        if request is None:
            assert not result.prompt_logprobs
            continue
        with torch.no_grad():
            logits = reference(torch.tensor([[*request.prompt, *result.tokens]])).logits[0]
        expected = torch.log_softmax(logits, -1)
        found = [*result.prompt_logprobs, *result.logprobs]
        for at, token in enumerate([*request.prompt, *result.tokens][1:]):
            assert found[at].logprob == pytest.approx(expected[at, token].item(), abs=2e-3)
            assert [value for _, value in found[at].top] == pytest.approx(
                expected[at].topk(2).values.tolist(), abs=2e-3
            )
        assert len(found) == len(request.prompt) - 1 + len(result.tokens)
    pairs = [(request.prompt[:1], request.prompt[1:]) for request in requests if len(request.prompt) > 1]
    scores = iter(engine.score(pairs))
    again = {result.id: result for result in engine.generate(requests)}
    for request in requests:
        if len(request.prompt) > 1:
            summed = sum(value.logprob for value in again[request.id].prompt_logprobs)
            assert next(scores).logprob == pytest.approx(summed, abs=2e-3)
    engine.close()


STEPS = st.lists(st.one_of(st.integers(0, 9), st.just("step"), st.integers(-9, -1)), max_size=30)


@pytest.mark.parametrize("name", POLICIES)
def test_any_interleaving_gives_each_request_the_tokens_it_gets_alone(model, cache, name):
    alone = {}
    engine = loaded(model, cache, POLICIES[name], **OPTIONS.get(name, {}))
    for number in range(10):
        alone |= {result.id: result for result in engine.generate([request_of(number)])}

    @settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(STEPS)
    def check(operations):
        submitted, cancelled, events = set(), set(), []
        for operation in operations:
            if operation == "step":
                events += engine.step()
            elif operation < 0:
                engine.cancel(f"r{-operation}")
                cancelled.add(f"r{-operation}")
            elif operation not in submitted:
                engine.submit(request_of(operation))
                submitted.add(operation)
        events += drained(engine)
        assert engine.step() == [] and used(engine) == 0
        ends = [event.result for event in events if isinstance(event, api.FinishedEvent)]
        assert sorted(result.id for result in ends) == sorted(f"r{number}" for number in submitted)
        for result in ends:
            mine = [event for event in events if isinstance(event, api.TokenEvent) and event.id == result.id]
            assert [(event.token, event.time_s) for event in mine] == [
                *zip(result.tokens, result.token_times_s, strict=True)
            ]
            if result.finish_reason == "cancelled":
                assert result.id in cancelled
                assert result.tokens == alone[result.id].tokens[: len(result.tokens)]
            else:
                assert result.tokens == alone[result.id].tokens
                assert likelihoods(result) == pytest.approx(likelihoods(alone[result.id]), abs=1e-4)
                assert len(result.prompt_logprobs) == len(alone[result.id].prompt_logprobs)

    check()
    engine.close()


def test_a_cancelled_request_gives_back_its_blocks_in_the_next_step(model, cache):
    engine = loaded(model, cache, POLICIES["sweep"])
    for number in (2, 4):
        engine.submit(api.GenerationRequest(f"r{number}", (5, 6, number), api.SamplingParams(30, ignore_eos=True)))
    engine.step()
    before, stats = used(engine), engine.stats()
    assert (stats.running, stats.waiting, stats.passes, stats.rows) == (2, 0, 1, 6)
    assert 0 < stats.task_s["products"] < stats.pass_s and 0 < stats.task_s["attention"] < stats.pass_s
    engine.cancel("r2")
    assert engine.pending() == 2
    events = engine.step()
    assert [e.result.finish_reason for e in events if isinstance(e, api.FinishedEvent)] == ["cancelled"]
    assert (used(engine), engine.pending()) == (before - 1, 1)
    engine.cancel("r4")
    assert len(engine.step()) == 1 and engine.stats().passes == 2, "no pass for nobody"
    engine.close()


def test_an_answer_tells_how_much_of_its_prompt_was_cached(model, cache):
    engine = loaded(model, cache, POLICIES["sweep"])
    prompt = tuple(range(5, 45))
    found = []
    for number in range(2):
        engine.submit(api.GenerationRequest(f"r{number}", prompt, api.SamplingParams(2, ignore_eos=True)))
        found += [event.result.cached_tokens for event in drained(engine) if isinstance(event, api.FinishedEvent)]
    assert found == [0, 32], "two whole blocks of sixteen"
    assert engine.stats().prefix_hit_tokens == 32
    engine.close()


def test_a_request_that_cannot_run_is_refused_and_the_others_go_on(model, cache):
    engine = loaded(model, cache, POLICIES["sweep"], longest=32)
    good = request_of(4)
    alone = answers(engine, [good])
    params = api.SamplingParams(4)
    engine.submit(good)
    engine.step()
    bad = {
        "empty": ((), params, "invalid", "the prompt is empty"),
        "unknown": ((VOCAB,), params, "invalid", "outside the vocabulary"),
        "hot": ((5,), api.SamplingParams(4, temperature=-1.0), "invalid", "temperature"),
        "stop": ((5,), api.SamplingParams(4, stop=("x",)), "invalid", "tokenizer"),
        "long": ((5,) * 60, api.SamplingParams(60), "infeasible", "can never fit a cache"),
        good.id: ((5,), params, "invalid", "another one with this id"),
    }
    for id, (prompt, sampling, _, _) in bad.items():
        engine.submit(api.GenerationRequest(id, prompt, sampling))
    events = drained(engine)
    refused = {event.id: event for event in events if isinstance(event, api.RefusedEvent)}
    assert refused.keys() == bad.keys()
    for id, (_, _, kind, reason) in bad.items():
        assert refused[id].kind == kind and reason in refused[id].reason and "\n" not in refused[id].reason
    [end] = [event for event in events if isinstance(event, api.FinishedEvent)]
    assert {end.result.id: end.result.tokens} == alone
    engine.close()


def test_log_probabilities_come_with_the_tokens(model, cache):
    engine = loaded(model, cache, POLICIES["sweep"])
    engine.submit(api.GenerationRequest("a", (5, 6), api.SamplingParams(3, logprobs=2, ignore_eos=True)))
    engine.submit(api.GenerationRequest("b", (5, 6), api.SamplingParams(3, ignore_eos=True)))
    events = drained(engine)
    [result] = [e.result for e in events if isinstance(e, api.FinishedEvent) and e.result.id == "a"]
    tokens = [event for event in events if isinstance(event, api.TokenEvent)]
    assert tuple(event.logprob for event in tokens if event.id == "a") == result.logprobs
    assert {event.logprob for event in tokens if event.id == "b"} == {None}
    engine.close()


def test_a_job_and_submitted_requests_do_not_mix(model, cache):
    engine = loaded(model, cache, POLICIES["sweep"])
    job = engine.generate([request_of(1)])
    next(job)
    engine.submit(request_of(2))
    with pytest.raises(api.HarnessError, match="one generation at a time"):
        engine.step()
    job.close()
    with pytest.raises(api.HarnessError, match="1 submitted requests pending"):
        engine.generate([request_of(1)])
    with pytest.raises(api.HarnessError, match="1 submitted requests pending"):
        engine.score([((5,), (6,))])
    assert [type(event) for event in drained(engine)][-1] is api.FinishedEvent
    assert len(list(engine.generate([request_of(1)]))) == 1
    engine.close()


def test_after_a_pass_that_fails_the_next_requests_run(model, cache, monkeypatch):
    engine = loaded(model, cache, POLICIES["sweep"])
    alone = answers(engine, [request_of(4)])
    run = Executor.run
    monkeypatch.setattr(Executor, "run", lambda *_: (_ for _ in ()).throw(MemoryError("no more")))
    engine.submit(request_of(2))
    with pytest.raises(MemoryError):
        engine.step()
    assert (engine.pending(), used(engine)) == (0, 0)
    monkeypatch.setattr(Executor, "run", run)
    engine.submit(request_of(4))
    assert {e.result.id: e.result.tokens for e in drained(engine) if isinstance(e, api.FinishedEvent)} == alone
    engine.close()


def test_prompts_leave_running_requests_time_for_their_next_token(model, cache):
    """A target that no pass can hold lets prompts in a few rows at a time; without one they fill the pass."""
    rows = {}
    for target in (None, 1e-9):
        engine = loaded(
            model, cache, {"schedule": "sweep", "gpu_batch_size": 3, "prefill_chunk": 64}, tpot_target_s=target
        )
        engine.submit(api.GenerationRequest("first", (5, 6), api.SamplingParams(40, ignore_eos=True)))
        engine.step()
        engine.submit(api.GenerationRequest("second", (7,) * 40, api.SamplingParams(2, ignore_eos=True)))
        passes = 0
        while all(event.id != "second" for event in engine.step()):
            passes += 1
        rows[target] = passes
        engine.close()
    assert rows == {None: 0, 1e-9: 4}


@pytest.mark.parametrize("options", [{"tpot_target_s": 1.0}, {"admission": "average"}])
def test_options_of_a_sweep_are_refused_for_blocks(model, cache, options):
    with pytest.raises(api.UnsupportedError, match=f"{next(iter(options))}.*use sweep"):
        loaded(model, cache, {"schedule": "row"}, **options)
    with pytest.raises(TypeError, match="admission must be exact or average, not all"):
        OffloadEngine(admission="all")
    with pytest.raises(TypeError, match="tpot_target_s"):
        OffloadEngine(tpot_target_s=0)


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.floats(1e-4, 1.0)), min_size=1, max_size=30),
    st.floats(1e-5, 2.0),
    st.integers(1, 500),
)
def test_a_latency_budget_follows_what_passes_took(model, observed, target, decoding):
    passes = PassModel()
    budget = LatencyBudget(target, 512, passes)
    assert budget(decoding) == 512, "nothing is known yet"
    for rows, seconds in observed:
        passes.observe(rows, seconds)
    assert budget(0) == 512, "nobody waits"
    assert 8 <= budget(decoding) <= 512
    assert budget(decoding) <= LatencyBudget(2 * target, 512, passes)(decoding)
    assert budget(decoding + 1) <= budget(decoding)


def test_the_pass_model_reads_rows_off_the_line_through_what_it_measured(model):
    passes = PassModel()
    for _ in range(50):
        for rows in (1, 8, 64, 512):
            passes.observe(rows, 0.01 if rows < 64 else rows * 0.001)
    assert passes.rows_within(0.005) == 0
    assert passes.rows_within(0.010) in range(8, 12)
    assert passes.rows_within(0.037) in range(34, 38)
    assert passes.rows_within(0.256) in range(250, 260)
    assert passes.rows_within(1.024) in range(1020, 1030)


def test_a_pass_that_fails_abandons_every_batch_and_raises_what_failed_first(model, cache, monkeypatch):
    engine = loaded(model, cache, POLICIES["zigzag"])
    alone = answers(engine, [request_of(4)])
    for number in range(1, 5):  # two batches
        engine.submit(request_of(number))
    multiply, finish, products, failed, abandoned = Executor._multiply, Executor._finish, itertools.count(1), [], []

    def fails(self, *given):
        if next(products) == 7:
            failed.append(self)
            raise MemoryError("failed first")
        multiply(self, *given)

    def fails_too(self):
        if failed:
            raise OSError("cannot be finished")
        finish(self)

    def abandon(batch):
        abandoned.append(batch)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "_multiply", fails)
        patch.setattr(Executor, "_finish", fails_too)
        patch.setattr(RunningBatch, "abandon", abandon)
        with pytest.raises(MemoryError, match="failed first"):
            engine.step()
    assert len(abandoned) == 2
    assert (engine.pending(), used(engine)) == (0, 0)
    engine.submit(request_of(4))
    assert {e.result.id: e.result.tokens for e in drained(engine) if isinstance(e, api.FinishedEvent)} == alone
    engine.close()
