"""Requests that begin alike compute it once, and say what they would have said alone."""

import gc
import random
from pathlib import Path

import pytest

from engines.offload.executor import Executor
from harness.api import GenerationRequest, HarnessError, SamplingParams
from tests.offload import all_greedy, answers, exact_score, words

pytestmark = pytest.mark.parametrize("model", ["llama"], indirect=True)


@pytest.fixture
def engine(model, tmp_path, load):
    return load(model, tmp_path, schedule="sweep", gpu_batch_size=6, prefill_chunk=40, max_sequence=100)[0]


def computed(engine):
    trace = engine.trace().metrics
    return round(trace["rows_per_pass"] * trace["passes"]), round(trace["shared_prompt_tokens"])


def few_shot(count, stem=60):
    rng = random.Random(0)
    begin = words(rng, stem)
    prompts = [begin + words(rng, rng.randint(1, 20)) for _ in range(count)]
    return [GenerationRequest(f"r{i}", p, SamplingParams(4, ignore_eos=True)) for i, p in enumerate(prompts)]


def test_a_shared_begin_is_computed_once_and_answers_stay_the_same(engine, reference):
    requests = few_shot(12)
    assert all_greedy(reference, requests, answers(engine, requests))
    rows, shared = computed(engine)
    assert rows + shared == sum(len(r.prompt) + 3 for r in requests)
    assert shared >= 10 * 56, "all but the first, and who came in the same pass"


def test_what_was_computed_is_still_there_for_the_next_call(engine):
    requests = few_shot(3)
    assert answers(engine, requests) == answers(engine, requests)
    rows, shared = computed(engine)
    assert shared == sum((len(r.prompt) - 1) // 8 * 8 for r in requests)
    assert rows + shared == sum(len(r.prompt) + 3 for r in requests)


def test_the_choices_of_a_question_are_scored_after_one_reading(engine, reference):
    rng = random.Random(1)
    context = words(rng, 64)
    pairs = [(context, (a, b)) for a, b in ((5, 6), (7, 8), (9, 10), (5, 11))]
    scores = engine.score(pairs)
    rows, shared = computed(engine)
    assert rows + shared == 4 * 65
    assert shared >= 2 * 56
    for pair, score in zip(pairs, scores, strict=True):
        assert score.logprob == pytest.approx(exact_score(reference, *pair).logprob, abs=2e-4)


def test_a_pass_that_fails_leaves_nothing_to_be_found(engine, reference, monkeypatch):
    requests = few_shot(4)
    run, passes = Executor.run, iter(range(100))

    def failing(*arguments):
        if next(passes) == 1:
            raise HarnessError("the disk is gone")
        return run(*arguments)

    monkeypatch.setattr(Executor, "run", failing)
    with pytest.raises(HarnessError, match="the disk is gone"):
        list(engine.generate(requests))
    monkeypatch.undo()
    assert all_greedy(reference, requests, answers(engine, requests))


@pytest.mark.slow
def test_ten_thousand_requests_leave_no_memory_and_no_files(engine):
    """Of one token each, so that it takes seconds; measured after the first thousand."""
    rng = random.Random(0)

    def thousand():
        prompts = (words(rng, rng.randint(1, 30)) for _ in range(1000))
        requests = [GenerationRequest(str(i), p, SamplingParams(1)) for i, p in enumerate(prompts)]
        assert sum(1 for _ in engine.generate(requests)) == 1000
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        return resident, len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # what earlier tests have left open must not close between the two counts
    first, files = thousand()
    for _ in range(9):
        last, now = thousand()
    assert now == files
    assert last - first < 8 << 20
