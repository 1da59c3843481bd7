"""Passes that are formed while the one before computes: the same passes and tokens, whatever happens meanwhile."""

import random
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.offload import timeline
from engines.offload.block_scheduler import BlockScheduler
from engines.offload.device.host import HostDevice
from engines.offload.engine import OffloadEngine
from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.kv_store.store import KVStore
from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.pass_forming import PassFormer
from engines.offload.prefill_budget import PrefillBudget
from engines.offload.scheduled_chunk import ActiveSequence
from engines.offload.scheduler import ContinuousScheduler
from harness import api
from tests.offload import VOCAB, prepare, save, save_with_tokenizer, words


class Known(ActiveSequence):
    """Generates the tokens 1, 2, and so on, and ends after `ends` of them as by an end of sequence."""

    def __init__(self, number, prompt, steps, ends):
        super().__init__([1000 + number] * prompt, steps)
        self.number, self.prompt, self.ends = number, prompt, min(steps, ends)

    def consume(self):
        self.tokens[-1] = len(self.times)
        return len(self.times) == self.ends


class Rash(ContinuousScheduler):
    """Lets everyone in at once, so that sequences are preempted."""

    def _fits(self, demand):
        return True


def passes_of(kind, lengths, blocks, limits, ahead):
    """All passes of a job without a model, as (sequence, cached tokens, rows), and its scheduler."""
    cache, content, passes, formed = BlockManager(blocks), {}, [], (None, None)
    sequences = [Known(number, *each) for number, each in enumerate(lengths)]
    scheduler = kind(sequences, cache, *limits)
    while scheduler.next_arrival_s is not None:
        batches, changes = formed
        if not batches or changes != scheduler.changes:
            batches = scheduler.next_pass(0.0)
        chunks = list(chain.from_iterable(batches))
        assert chunks, "something runs as long as something is left"
        passes.append([(chunk.sequence.number, chunk.cached, chunk.count) for chunk in chunks])
        for chunk in chunks:
            tokens, table = chunk.sequence.tokens, chunk.block_table
            for at in range(chunk.cached, chunk.cached + chunk.count):
                content[table[at // BLOCK_SIZE], at % BLOCK_SIZE] = tuple(tokens[: at + 1])
        for chunk in chunks:
            tokens, table = chunk.sequence.tokens, chunk.block_table
            for at in range(chunk.cached + chunk.count):
                assert content[table[at // BLOCK_SIZE], at % BLOCK_SIZE] == tuple(tokens[: at + 1])
        generating = scheduler.advance(chunks)
        before = scheduler.preemptions
        formed = (scheduler.next_pass(0.0, ahead=True), scheduler.changes) if ahead else formed
        assert scheduler.preemptions == before
        for sequence in generating:
            if sequence.consume() and sequence.steps_left:
                scheduler.finish(sequence)
    assert cache.num_free_blocks == blocks
    assert [len(sequence.times) for sequence in sequences] == [sequence.ends for sequence in sequences]
    return passes, scheduler


JOB = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=15)
SCHEDULERS = st.sampled_from([(ContinuousScheduler, 1), (Rash, 1), (BlockScheduler, 2)])


@given(JOB, SCHEDULERS, st.integers(12, 40), st.integers(1, 12), st.integers(3, 64))
def test_passes_formed_ahead_are_those_that_are_formed_afterwards(job, scheduler, blocks, size, chunk):
    kind, batches = scheduler
    limits = (size, PrefillBudget(chunk, 1, chunk)) if batches == 1 else (size, batches, chunk)
    to_the_end = [(prompt, steps, steps) for prompt, steps, _ in job]
    found, through = passes_of(kind, to_the_end, blocks, limits, ahead=True)
    # a pass that would preempt is given up, and whom it let in stays: the next one has another order, or other parts
    assert through.preemptions or found == passes_of(kind, to_the_end, blocks, limits, ahead=False)[0]
    passes, ended = passes_of(kind, job, blocks, limits, ahead=True)  # some end before their length
    rows = sum(count for _, _, count in chain.from_iterable(passes))
    needed = sum(prompt + min(steps, ends) - 1 for prompt, steps, ends in job)
    assert ended.preemptions or rows == needed, "no row in vain"


def test_the_time_between_passes_counts_while_somebody_waits(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timeline, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    kept = timeline.Timeline()
    for began, ended, somebody_waits in ((0.0, 1.0, True), (1.5, 2.5, False), (9.0, 11.0, True), (11.25, 12.25, True)):
        now[0] = began
        kept.begin_pass()
        kept.add("compute", "head", began, ended)
        now[0] = ended
        kept.close_pass(1)
        if not somebody_waits:
            kept.rest()
    assert kept.passes == 0
    assert [sums.idle_s for sums in kept.settle()] == [0.0, 0.5, 0.0, 0.25]
    metrics = kept.trace().metrics
    assert metrics["between_passes_s"] == 0.75 and metrics["between_passes_share"] == 0.75 / 5.0


def test_a_pass_is_not_formed_ahead_where_a_store_would_be_read(model, cache, monkeypatch):
    """It takes its blocks when it begins, and the pass before is not kept waiting by a disk."""
    looking, reads = [], []
    look_ahead, get = PassFormer.look_ahead, KVStore.get

    def looked(self, *given):
        looking.append(self)
        look_ahead(self, *given)
        looking.pop()

    def got(self, *given):
        reads.append(bool(looking))
        return get(self, *given)

    monkeypatch.setattr(PassFormer, "look_ahead", looked)
    monkeypatch.setattr(KVStore, "get", got)
    engine = loaded(model, cache, {**POLICIES["sweep"], "gpu_batch_size": 2}, kv_store={"host": 1 << 20})
    lasting = api.SamplingParams(12, ignore_eos=True)
    again = api.GenerationRequest("again", tuple(range(2, 42)), api.SamplingParams(2, ignore_eos=True))
    [before] = engine.generate([again])
    engine.loaded.cache.reset_prefix_cache()
    for request in (replace(again, id="ends", prompt=(5, 6)), api.GenerationRequest("lasts", (7, 8), lasting), again):
        engine.submit(request)
    ends = {result.id: result for result in ends_of(drained(engine))}
    assert reads == [False] * (32 // BLOCK_SIZE)
    assert ends["again"].tokens == before.tokens and ends["again"].cached_tokens == 32
    assert 0 < engine.stats().formed_ahead < engine.stats().passes
    engine.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One token in eight ends a sequence; in bfloat16, which pools multiply."""
    folder = save_with_tokenizer(tmp_path_factory.mktemp("llama"))
    save(folder, "llama", torch.bfloat16, bos_token_id=0, eos_token_id=[*range(1, VOCAB, 8)])
    return prepare(folder)


POLICIES = {
    "row": {"schedule": "row", "gpu_batch_size": 3},
    "zigzag": {"schedule": "zigzag", "gpu_batch_size": 2, "num_gpu_batches": 2},
    "sweep": {"schedule": "sweep", "gpu_batch_size": 3, "prefill_chunk": 7},
    "nano": {"schedule": "sweep", "gpu_batch_size": 4, "nano_batches": 2, "weights": (0.0, 0.5, 0.5)},
    "disk": {"schedule": "sweep", "gpu_batch_size": 3, "cache": (0.0, 0.5, 0.5), "weights": (0.0, 0.0, 1.0)},
}


def loaded(model, cache, policy, threads=2, **options):
    engine = OffloadEngine(**options)
    job = api.Job(cache, cache, 64, 64, reproducible=True)
    engine.load(
        model, api.OffloadPolicy(**{"threads": threads, "async_scheduling": True, **policy}), api.HardwareLimits(), job
    )
    return engine


def request_of(number):
    """Some begin alike; some sample; some end by their length only, some by tokens, some by a word too."""
    rng = random.Random(number)
    prompt = (*((7,) * 18 if number % 2 else ()), *words(rng, rng.randint(1, 20)))
    sampling = api.SamplingParams(
        rng.randint(1, 12), temperature=number % 4 / 2, seed=number, ignore_eos=number % 3 == 0,
        stop=("w4",) if number in (1, 4) else (), prompt_logprobs=number == 5, logprobs=2 if number == 5 else None,
    )  # fmt: skip
    return api.GenerationRequest(f"r{number}", prompt, sampling)


def ends_of(events):
    return [event.result for event in events if isinstance(event, api.FinishedEvent)]


def drained(engine):
    events = []
    while engine.pending():
        events += engine.step()
    return events


STEPS = st.lists(st.one_of(st.integers(0, 9), st.just("step"), st.integers(-9, -1)), max_size=30)


@pytest.mark.parametrize("name", POLICIES)
def test_tokens_are_those_of_passes_that_are_formed_afterwards(model, cache, name):
    requests = [request_of(number) for number in range(10)]
    engine = loaded(model, cache, {**POLICIES[name], "async_scheduling": False})
    alone = {result.id: result for result in engine.generate(requests)}
    assert engine.stats().formed_ahead == 0
    assert {result.finish_reason for result in alone.values()} == {"length", "stop"}
    engine.close()
    engine = loaded(model, cache, POLICIES[name])

    @settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(STEPS)
    def check(operations):
        submitted, events = set(), []
        for operation in operations:
            if operation == "step":
                events += engine.step()
            elif operation < 0:
                engine.cancel(f"r{-operation}")
            elif operation not in submitted:
                engine.submit(requests[operation])
                submitted.add(operation)
        ends = ends_of([*events, *drained(engine)])
        assert sorted(result.id for result in ends) == sorted(f"r{number}" for number in submitted)
        assert not sum(engine.stats().kv_blocks_used.values())
        for result in ends:
            expected = alone[result.id]
            if result.finish_reason == "cancelled":
                assert result.tokens == expected.tokens[: len(result.tokens)]
            else:
                assert (result.tokens, result.finish_reason) == (expected.tokens, expected.finish_reason)
                assert len(result.prompt_logprobs) == len(expected.prompt_logprobs)

    check()
    found = {result.id: result.tokens for result in engine.generate(requests)}
    assert found == {result.id: result.tokens for result in alone.values()}
    assert 0 < engine.stats().formed_ahead < engine.stats().passes
    assert 0 < engine.trace().metrics["between_passes_s"] <= engine.stats().between_passes_s
    engine.close()


def test_scores_are_those_of_passes_that_are_formed_afterwards(model, cache):
    rng = random.Random(0)
    pairs = [(words(rng, rng.randint(1, 30)), words(rng, rng.randint(1, 9))) for _ in range(8)]
    found = []
    for ahead in (True, False):
        engine = loaded(model, cache, {**POLICIES["sweep"], "async_scheduling": ahead})
        found.append(engine.score(pairs))
        assert bool(engine.stats().formed_ahead) == ahead
        engine.close()
    assert found[0] == found[1]


def test_whoever_comes_while_a_pass_computes_is_in_the_next_one(model, cache):
    engine = loaded(model, cache, POLICIES["sweep"])
    engine.submit(api.GenerationRequest("first", (5, 6), api.SamplingParams(9, ignore_eos=True)))
    engine.step()
    engine.submit(api.GenerationRequest("second", (7, 8), api.SamplingParams(9, ignore_eos=True)))
    assert [event.id for event in engine.step()] == ["first", "second"]
    engine.close()


def test_one_thread_forms_no_pass_ahead(model, cache):
    engine = loaded(model, cache, POLICIES["sweep"], threads=1)
    assert len(list(engine.generate([request_of(3)]))) == 1
    assert engine.stats().formed_ahead == 0
    engine.close()


def test_preemptions_of_all_runs_are_counted(model, cache, monkeypatch):
    engine, formed = loaded(model, cache, POLICIES["row"] | {"async_scheduling": False}), []
    form = BlockScheduler.next_pass

    def preempting(self, *args):
        self.preemptions += 2
        formed.append(self)
        return form(self, *args)

    monkeypatch.setattr(BlockScheduler, "next_pass", preempting)
    for _ in range(2):
        assert len(list(engine.generate([request_of(3)]))) == 1
    assert len(set(map(id, formed))) == 2 and engine.stats().preemptions == 2 * len(formed)
    engine.close()


def test_after_a_pass_that_fails_with_its_sequences_gone_the_next_requests_run(model, cache, monkeypatch):
    engine = loaded(model, cache, POLICIES["sweep"])
    [alone] = engine.generate([request_of(3)])

    def fail(*_):
        raise MemoryError("no more")

    engine.submit(api.GenerationRequest("last step", (5, 6), api.SamplingParams(1)))
    engine.submit(api.GenerationRequest("goes on", (5, 6), api.SamplingParams(9, ignore_eos=True)))
    with monkeypatch.context() as patch:
        patch.setattr(HostDevice, "download", fail)
        with pytest.raises(MemoryError):
            engine.step()
    assert (engine.pending(), sum(engine.stats().kv_blocks_used.values())) == (0, 0)
    engine.submit(request_of(3))
    [end] = ends_of(drained(engine))
    assert end.tokens == alone.tokens
    engine.close()
