"""Who shares a pass: admission within the cache's blocks, order, and what is put back."""

import dataclasses
import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.offload.admission import AverageLength, BlockDemand
from engines.offload.block_scheduler import BlockScheduler
from engines.offload.kv_cache.block_hashes import extend_block_hashes
from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.memory.kv_blocks import BLOCK_SIZE, blocks_for
from engines.offload.prefill_budget import PrefillBudget, search_prefill_budget, steady_blocks
from engines.offload.scheduled_chunk import prompt_rows
from engines.offload.scheduler import ContinuousScheduler
from engines.offload.scoring import Scoring
from engines.offload.sequence import Generation
from harness.api import GenerationRequest, OffloadPolicy, SamplingParams

_others = itertools.count()


STEPS = st.integers(1, 20)


def generation(prompt, new, arrival=0.0):
    """A sequence that begins like no other."""
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    request = GenerationRequest("x", (next(_others),) * prompt, params, arrival)
    return Generation(request, (), None)


LOGITS = torch.zeros(1, 8)


def run(scheduler, part):
    """What a model would do for a part of a pass; returns whether it ends the sequence, which then is finished."""
    sequence = part.sequence
    logits = LOGITS.repeat(len(sequence.logits_positions(part.count)), 1)
    scheduler.advance([part])
    if done := sequence.consume(logits, 0.0):
        scheduler.finish(sequence)
    return done


def drive(kind, pairs, blocks, *limits, most_passes=10_000):
    """Runs all passes without a model; returns the sequences, and the blocks held and tokens computed by pass."""
    sequences, cache = [generation(prompt, new) for prompt, new in pairs], BlockManager(blocks)
    scheduler = kind(sequences, cache, *limits)
    held, rows = [], []
    done = 0
    while scheduler.next_arrival_s is not None:
        batches = scheduler.next_pass(1e9)
        assert batches, "something runs as long as something is left"
        held.append(cache.num_blocks - cache.num_free_blocks)
        rows.append(sum(p.count for b in batches for p in b))
        for batch in batches:
            for part in batch:
                assert len(part.sequence.block_table) >= blocks_for(part.sequence.cached + part.count)
                done += run(scheduler, part)
        assert len(held) < most_passes
    assert done == len(sequences)
    assert cache.num_free_blocks == cache.num_blocks
    return sequences, held, rows


lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=25)


@settings(deadline=None)
@given(lengths, st.integers(12, 80), st.integers(1, 30), st.integers(1, 64))
def test_a_sweep_serves_everyone_within_the_cache(pairs, blocks, size, chunk):
    _, held, rows = drive(ContinuousScheduler, pairs, blocks, size, PrefillBudget(chunk, 1, chunk))
    assert max(held) <= blocks
    assert max(rows) <= size + chunk


@settings(deadline=None)
@given(lengths, st.integers(12, 80), st.integers(1, 8), st.integers(1, 4), st.integers(1, 64))
def test_blocks_serve_everyone_within_the_cache(pairs, blocks, size, batches, chunk):
    _, held, _ = drive(BlockScheduler, pairs, blocks, size, batches, chunk)
    assert max(held) <= blocks


demands = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=25)


@given(demands, st.integers(0, 25))
def test_the_predicted_peak_is_the_peak(rows, at_once):
    """However many of the sequences were there before the others came, one by one."""
    known = [(generation(p, n), range(min(shared, p // BLOCK_SIZE)), n) for p, n, shared in rows]
    demand = BlockDemand(known[:at_once])
    for one in known[at_once:]:
        before = demand.most_blocks
        demand, smaller = demand.plus(*one), demand
        assert smaller.most_blocks == before <= demand.most_blocks
    most = max(len(prefix) for _, prefix, _ in known)  # all of them begin with the same blocks
    by_hand = max(
        sum(blocks_for(len(s.tokens) + t) - len(prefix) for s, prefix, n in known if t < n)
        for t in range(max(n for _, _, n in known))
    )
    assert demand.most_blocks == by_hand + most


def test_a_sweep_is_measured_over_four_blocks():
    blocks = {schedule: steady_blocks(OffloadPolicy(schedule=schedule)) for schedule in ("row", "zigzag", "sweep")}
    assert blocks == {"row": 1, "zigzag": 1, "sweep": 4}


def test_where_no_balance_exceeds_what_keeps_sequences_running_there_is_one_budget():
    [budget] = {search_prefill_budget([((1,) * 64, 8)] * 9, 400, 8, 8, rows, 512) for rows in (1, 32, 64)}
    assert [budget(decoding) for decoding in (0, 8, 1000)] == [64, 64, 64]


def test_nobody_demands_nothing():
    assert BlockDemand().most_blocks == 0


def test_a_sweep_holds_more_sequences_than_a_block_in_the_same_cache():
    """Memory follows the average context, not the longest."""
    prompt, new, count = 32, 64, 60
    cache = BlockManager(10 * blocks_for(prompt + new))
    sequences = [generation(prompt, new) for _ in range(count)]
    scheduler = ContinuousScheduler(sequences, cache, 100, PrefillBudget(8, 1, 64))
    running = []
    while scheduler.next_arrival_s is not None:
        for part in scheduler.next_pass(0.0)[0]:
            run(scheduler, part)
        running.append(len(scheduler.running))
    assert max(running) >= 13


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 8), st.integers(2, 40), st.integers(3, 8))
def test_a_sweep_is_the_diagonal_block_schedule(prompt_blocks, new, size):
    """FlexGen (Sheng et al. 2023), appendix A.2: sequences of all ages hold s + n/2 tokens on average, where a zig-zag
    block holds s + n for each. So in the same memory fewer passes read the weights: by 2 (s + n) / (2 s + n) at most,
    which is below 2 (theorem 4.1), and never more, but for the passes in which the first ones come and the last ones
    go."""
    prompt, count = prompt_blocks * BLOCK_SIZE, 12 * size
    last = prompt + new - 1  # tokens that a sequence has in the cache at its end
    blocks = size * blocks_for(last)
    pairs = [(prompt, new)] * count
    _, _, in_step = drive(BlockScheduler, pairs, blocks, size, 1, 10**6)
    mean = sum(blocks_for(prompt + i) for i in range(new)) / new
    work = [((i,) * prompt, new) for i in range(count)]
    # passes cost as much whatever their rows, as where reading the weights takes longest
    budget = search_prefill_budget(work, blocks, 10**6, int(blocks // mean), 10**6, 10**6)
    _, _, diagonal = drive(ContinuousScheduler, pairs, blocks, 10**6, budget)
    most = blocks / mean / size  # the bound, by whole blocks: 2 (s + n) / (2 s + n) with blocks of one token
    assert most <= 2
    assert len(in_step) == 12 * new
    assert len(in_step) <= most * len(diagonal)
    assert len(diagonal) <= len(in_step) + new


def test_a_sequence_waits_for_its_arrival():
    early, late = generation(4, 3), generation(4, 3, arrival=5.0)
    scheduler = ContinuousScheduler([late, early], BlockManager(20), 8, PrefillBudget(64, 1, 64))
    assert [p.sequence for p in scheduler.next_pass(0.0)[0]] == [early]
    scheduler.finish(early)
    assert scheduler.next_pass(0.0) == []
    assert scheduler.next_arrival_s == 5.0
    assert [p.sequence for p in scheduler.next_pass(5.0)[0]] == [late]


class Rash(ContinuousScheduler):
    """Lets everyone in at once, so that the cache is too small and someone must be put back."""

    def _fits(self, demand):
        return True


@settings(deadline=None)
@given(lengths, st.integers(12, 40), st.integers(2, 30), st.integers(1, 64))
def test_preempted_sequences_are_computed_again_and_all_finish(pairs, blocks, size, chunk):
    sequences, held, _ = drive(Rash, pairs, blocks, size, PrefillBudget(chunk, 1, chunk), most_passes=200_000)
    assert max(held) <= blocks
    assert [len(s.result().tokens) for s in sequences] == [n for _, n in pairs]


@settings(deadline=None)
@given(lengths, st.integers(12, 40), st.integers(2, 30), st.integers(1, 64))
def test_admission_by_the_average_serves_everyone_within_the_cache(pairs, blocks, size, chunk):
    limits = (size, PrefillBudget(chunk, 1, chunk), None, AverageLength())
    sequences, held, _ = drive(ContinuousScheduler, pairs, blocks, *limits, most_passes=200_000)
    assert max(held) <= blocks
    assert [len(s.result().tokens) for s in sequences] == [n for _, n in pairs]


def test_the_average_lets_more_in_and_those_that_go_further_are_preempted():
    """Ten blocks; eight tokens each at first and at most 64."""
    average = AverageLength()
    for _ in range(4):
        ended = generation(8, 64)
        ended.times = [0.0] * 8
        average.observe(ended)
    running = {}
    for name, rule in (("exact", None), ("average", average)):
        sequences, cache = [generation(8, 64) for _ in range(6)], BlockManager(10)
        scheduler = ContinuousScheduler(sequences, cache, 6, PrefillBudget(64, 1, 64), None, rule)
        [chunks] = scheduler.next_pass(0.0)
        running[name] = len(chunks)
        while scheduler.next_arrival_s is not None:
            for chunk in chunks:
                run(scheduler, chunk)
            chunks = [c for batch in scheduler.next_pass(0.0) for c in batch]
        assert [len(s.result().tokens) for s in sequences] == [64] * 6
        # each at most once: who was preempted is not guessed again
        assert scheduler.preemptions == {"exact": 0, "average": 4}[name]
    assert running == {"exact": 1, "average": 5}


def test_who_has_run_counts_in_the_average_and_who_was_cancelled_before_does_not():
    average, sequences = AverageLength(), [generation(8, 64) for _ in range(2)]
    scheduler = ContinuousScheduler(sequences, BlockManager(20), 1, PrefillBudget(64, 1, 64), None, average)
    [[chunk]] = scheduler.next_pass(0.0)
    scheduler.finish(sequences[1])
    assert list(scheduler.waiting) == [] and average.steps_left(generation(8, 64)) == 64
    run(scheduler, chunk)
    scheduler.finish(sequences[0])
    assert average.steps_left(generation(8, 64)) == 1


def test_a_guess_is_between_one_step_and_the_most():
    average, sequence = AverageLength(), generation(8, 20)
    assert average.steps_left(sequence) == 20
    for generated in (3, 10):
        ended = generation(8, 64)
        ended.times = [0.0] * generated
        average.observe(ended)
    assert average.steps_left(sequence) == 7
    sequence.times = [0.0] * 9
    assert average.steps_left(sequence) == 1
    for _ in range(40):
        ended = generation(8, 64)
        ended.times = [0.0] * 64
        average.observe(ended)
    assert average.steps_left(sequence) == 11


def test_closing_a_scheduler_frees_every_block():
    sequences = [generation(20, 5) for _ in range(4)]
    cache = BlockManager(40)
    scheduler = ContinuousScheduler(sequences, cache, 4, PrefillBudget(64, 1, 64))
    scheduler.next_pass(0.0)
    assert cache.num_free_blocks < 40
    scheduler.close()
    assert cache.num_free_blocks == 40


def work(pairs):
    return [((next(_others),) * prompt, steps) for prompt, steps in pairs]


@given(lengths, st.integers(12, 80), st.integers(1, 30), st.integers(1, 200))
def test_the_prefill_budget_found_takes_no_longer_than_the_first_one_tried(pairs, blocks, size, balance):
    """The rule found does no fewer steps in a unit of time than the first one tried, when both are played for real."""
    together = min(size, max(1, blocks // blocks_for(45)))
    found = search_prefill_budget(work(pairs), blocks, size, together, balance, 64)
    first = dataclasses.replace(found, balance=balance)
    times = []
    for rule in (found, first):
        _, _, rows = drive(ContinuousScheduler, pairs, blocks, size, rule)
        times.append(sum(max(balance, r) for r in rows))
    if len(pairs) <= 4 * together:  # longer jobs are judged by their steady state
        assert times[0] <= times[1]


def test_a_long_job_lets_prompts_in_one_after_the_other_and_a_short_one_at_once():
    """At 32 + 64 tokens in 648 blocks: in step 54 sequences fit, of mixed ages 80."""
    long, short = (search_prefill_budget(work([(32, 64)] * n), 648, 96, 80, 165, 512) for n in (1000, 54))
    assert long.balance < short.balance == 165


def prompts(draw, count):
    """Prompts of which many begin alike."""
    stems = [tuple(draw.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))) for n in (8, 16, 40)]
    return [
        draw.draw(st.sampled_from(stems)) + tuple(draw.draw(st.lists(st.integers(0, 1), min_size=1, max_size=30)))
        for _ in range(count)
    ]


@settings(deadline=None)
@given(st.data(), st.integers(1, 12), st.integers(12, 60), st.integers(1, 12), st.integers(1, 64), st.booleans())
def test_shared_blocks_hold_the_sequences_own_tokens(data, count, blocks, size, chunk, rash):
    """A model of the cache's content: each block must hold, for each sequence, just its own tokens."""
    sequences = [
        Generation(GenerationRequest(str(i), p, SamplingParams(data.draw(STEPS), ignore_eos=True)), (), None)
        for i, p in enumerate(prompts(data, count))
    ]
    pool, content = BlockManager(blocks), {}
    scheduler = (Rash if rash else ContinuousScheduler)(sequences, pool, size, PrefillBudget(chunk, 1, chunk))
    computed = 0
    while scheduler.next_arrival_s is not None:
        (parts,) = scheduler.next_pass(0.0)
        held = [block for s in scheduler.running for block in s.block_table]
        assert len(set(held)) == blocks - pool.num_free_blocks
        for part in parts:
            s = part.sequence
            computed += part.count
            for t in range(s.cached, s.cached + part.count):
                content[s.block_table[t // BLOCK_SIZE], t % BLOCK_SIZE] = (tuple(s.tokens[: t + 1]), id(s))
        for part in parts:
            s = part.sequence
            for t in range(s.cached + part.count):
                assert content[s.block_table[t // BLOCK_SIZE], t % BLOCK_SIZE][0] == tuple(s.tokens[: t + 1])
            run(scheduler, part)
    assert pool.num_free_blocks == blocks
    asked = sum(len(s.request.prompt) + s.request.sampling.max_tokens - 1 for s in sequences)
    # a prompt that takes several passes may cost a younger sequence its blocks: when it comes back it computes some of
    # it again, and what it then finds is not counted, be it its own or what others have published meanwhile
    assert scheduler.preemptions or computed + scheduler.prefix_hit_tokens == asked


def test_the_second_of_two_that_begin_alike_computes_the_rest_only():
    first, second = (generation(1, 2) for _ in range(2))
    first.tokens[:] = [*range(40), 1]
    second.tokens[:] = [*range(40), 2, 3]
    cache = BlockManager(20)
    scheduler = ContinuousScheduler([first, second], cache, 2, PrefillBudget(41, 1, 41))
    [[part]] = scheduler.next_pass(0.0)
    assert (part.sequence, part.count) == (first, 41)
    scheduler.advance([part])
    first.consume(LOGITS.clone(), 0.0)
    assert {id(p.sequence): p.count for p in scheduler.next_pass(0.0)[0]} == {id(first): 1, id(second): 2}
    assert second.block_table[:5] == first.block_table[:5]
    assert scheduler.prefix_hit_tokens == 40
    assert cache.num_free_blocks == 20 - 5 - 2


def test_freed_blocks_stay_in_the_prefix_cache_until_they_are_reused():
    pool, names = BlockManager(4), []
    extend_block_hashes(list(range(16)), names, 16)
    blocks = pool.allocate(2)
    for block, name in zip(blocks, names, strict=True):
        pool.cache_block(block, name)
    pool.free(blocks)
    assert pool.num_free_blocks == 4
    assert pool.match_prefix(names) == blocks
    pool.allocate(3)
    assert pool.match_prefix(names) == blocks[:1], "of a text its end is lost first"
    pool.reset_prefix_cache()
    assert pool.match_prefix(names) == []
    assert pool.num_free_blocks == 1


@given(st.integers(2, 200), st.integers(3, 40), st.data())
def test_no_row_of_a_prompt_is_left_by_itself(missing, room, data):
    """Whatever others take of a pass, and so that every pass with room for three or more goes on."""
    while missing:
        left = data.draw(st.one_of(st.just(room), st.integers(0, room)))
        count = prompt_rows(missing, left, room)
        assert 0 <= count <= min(left, missing)
        assert count != 1
        assert missing - count != 1
        assert count or left < room
        missing -= count if count else 0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(3, 50),
    st.integers(3, 50),
    st.sampled_from(["sweep", "row", "zigzag"]),
)
def test_no_more_rows_meet_the_head_than_may_and_no_row_of_a_prompt_is_alone(lengths, chunk, heads, schedule):
    sequences = [Scoring(i, [0] * (before + after), after) for i, (before, after) in enumerate(lengths)]
    pool = BlockManager(400)
    if schedule == "sweep":
        scheduler = ContinuousScheduler(sequences, pool, 8, PrefillBudget(chunk, 1, chunk), heads)
    else:
        scheduler = BlockScheduler(sequences, pool, 4, 2 if schedule == "zigzag" else 1, chunk, heads)
    while scheduler.next_arrival_s is not None:
        batches = scheduler.next_pass(0.0)
        assert any(batches)
        for parts in batches:
            assert sum(len(p.sequence.logits_positions(p.count)) for p in parts) <= heads
            assert sum(p.count for p in parts if len(p.sequence.tokens) - p.sequence.cached > 1) <= chunk
            for part in parts:
                s = part.sequence
                assert part.count > 1 or (part.count, len(s.tokens)) == (1, 1)
                run(scheduler, part)
