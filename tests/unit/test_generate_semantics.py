"""What a request asks for beyond greedy choice means the same on every engine that has a model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.adapters.accelerate import AccelerateEngine
from engines.adapters.transformers import TransformersEngine
from engines.common import sampling
from engines.offload.engine import OffloadEngine
from harness.api import GenerationRequest, HarnessError, SamplingParams
from tests.offload import CONTEXT, VOCAB, answers, drop_tensor, load, logits_of, prepare, save, tiny

PROMPT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("llama"), "llama", initializer_range=0.05)


@pytest.fixture(scope="module", params=[TransformersEngine, AccelerateEngine, OffloadEngine])
def engine(request, model, tmp_path_factory):
    engine, _ = load(model, tmp_path_factory.mktemp("cache"), engine=request.param(), gpu_batch_size=8)
    yield engine
    engine.close()


def one(engine, **asked):
    (result,) = engine.generate([GenerationRequest("r", PROMPT, SamplingParams(**asked))])
    return result


def log_probs(reference, prompt, tokens):
    return logits_of(reference, prompt, tokens).log_softmax(-1)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_are_the_models_own(engine, reference, temperature):
    result = one(engine, max_tokens=6, temperature=temperature, top_k=5, seed=1, ignore_eos=True, logprobs=3)
    expected = log_probs(reference, PROMPT, result.tokens)
    assert len(result.logprobs) == 6
    for token, found, row in zip(result.tokens, result.logprobs, expected, strict=True):
        assert found.logprob == pytest.approx(row[token].item(), abs=1e-4)
        values, ids = row.topk(3)
        assert [i for i, _ in found.top] == ids.tolist()
        assert [v for _, v in found.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert temperature or [p.top[0][0] for p in result.logprobs] == list(result.tokens)


def test_logprobs_are_given_to_those_who_asked(engine):
    asked = (None, 0, 2)
    requests = [GenerationRequest(str(n), PROMPT, SamplingParams(3, ignore_eos=True, logprobs=n)) for n in asked]
    found = {r.id: r.logprobs for r in engine.generate(requests)}
    assert found["None"] == ()
    assert [len(p.top) for p in found["0"]] == [0, 0, 0]
    assert [len(p.top) for p in found["2"]] == [2, 2, 2]
    assert [p.logprob for p in found["0"]] == [p.logprob for p in found["2"]]


def test_min_p_keeps_what_is_likely_enough(engine, reference):
    row = log_probs(reference, PROMPT, (0,))[0].exp()
    allowed = set(torch.where(row >= 0.3 * row.max())[0].tolist())
    assert 1 < len(allowed) < len(row)
    sampling = [SamplingParams(1, temperature=1.0, min_p=0.3, seed=i) for i in range(60)]
    requests = [GenerationRequest(str(i), PROMPT, asked) for i, asked in enumerate(sampling)]
    drawn = {token for (token,) in answers(engine, requests).values()}
    assert drawn <= allowed
    assert len(drawn) > 1


def test_min_tokens_puts_the_end_off(engine, monkeypatch):
    free = one(engine, max_tokens=12, ignore_eos=True).tokens
    end = free[1]  # whatever comes second ends the sequence from now on
    expected = next(i for i, token in enumerate(free) if token == end) + 1
    if isinstance(engine, OffloadEngine):
        monkeypatch.setattr(engine.loaded.meta_model, "eos", (end,))
    else:
        monkeypatch.setattr(engine._module.generation_config, "eos_token_id", end)
    early = one(engine, max_tokens=12)
    late = one(engine, max_tokens=12, min_tokens=5)
    assert early.tokens == free[:expected]
    assert early.finish_reason == "stop"
    assert len(late.tokens) >= 5
    assert end not in late.tokens[:4]


@pytest.mark.parametrize(
    ("text", "expected"), [("bbb", [None, None, "stop"]), ("ababa", [None, None, None, "stop", "stop"])]
)
def test_a_stop_string_of_before_min_tokens_does_not_count(text, expected):
    asked, counts = SamplingParams(10, min_tokens=3, stop=("b",)), range(1, len(text) + 1)
    assert [sampling.finish_reason(asked, range(n), (), lambda t: text[: len(t)]) for n in counts] == expected


PIECES = [b"a", b"b", b"ab ", b"", "\u00e9".encode()[:1], "\u00e9".encode()[1:], b"xyzxyz"]


def pieces_text(tokens):
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


@given(
    st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=120),
    st.lists(st.sampled_from(["ab a", "\u00e9b", "zx", "bbbb", "xyzxyzxyzab "]), min_size=1, max_size=2),
    st.integers(0, 60),
)
def test_a_stop_string_ends_a_long_text_where_a_search_of_the_whole_text_finds_it(tokens, stops, least):
    asked = SamplingParams(200, min_tokens=least, stop=tuple(stops))
    early = len(pieces_text(tokens[: max(0, least - 1)]))
    counts = range(max(1, least), len(tokens) + 1)
    expected = next((n for n in counts if asked.stop_at(pieces_text(tokens[:n]), early) is not None), None)
    assert next((n for n in counts if sampling.finish_reason(asked, tokens[:n], (), pieces_text)), None) == expected


def test_a_late_token_of_a_request_with_stop_strings_decodes_as_much_as_an_early_one():
    decoded = []

    def decode(tokens):
        decoded.append(len(tokens))
        return "a" * len(tokens)

    assert sampling.finish_reason(SamplingParams(5000, stop=("stop",)), [0] * 4000, (), decode) is None
    assert sum(decoded) < 40


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ((), {}, "the prompt is empty"),
        ((5, VOCAB), {}, f"token id {VOCAB} is outside the vocabulary"),
        ((-1,), {}, "token id -1 is outside the vocabulary"),
        ((5,) * (CONTEXT - 3), {"max_tokens": 4}, rf"{CONTEXT - 3} prompt \+ 4 new tokens exceed the model's context"),
        ((5,), {"max_tokens": 0}, "max_tokens is 0"),
        ((5,), {"min_tokens": 3, "max_tokens": 2}, "min_tokens is 3"),
        ((5,), {"temperature": -1.0}, "temperature is -1.0"),
        ((5,), {"temperature": float("nan")}, "temperature is nan"),
        ((5,), {"temperature": float("inf")}, "temperature is inf"),
        ((5,), {"top_p": 0.0}, "top_p is 0.0"),
        ((5,), {"min_p": 1.5}, "min_p is 1.5"),
        ((5,), {"min_p": -0.1}, "min_p is -0.1"),
        ((5,), {"logprobs": -1}, "logprobs is -1"),
        ((5,), {"seed": -1}, "seed is -1"),
        ((5,), {"seed": 1 << 64}, "seed is 18446744073709551616"),
    ],
)
def test_requests_that_cannot_be_run_are_named_before_any_work(engine, prompt, sampling, message):
    good = GenerationRequest("good", (5, 6), SamplingParams(2))
    with pytest.raises(HarnessError, match=f"request bad: .*{message}"):
        engine.generate([good, GenerationRequest("bad", prompt, SamplingParams(**sampling))])


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (((1,), ()), "continuation is empty"),
        (((1,), (VOCAB,)), "outside the vocabulary"),
        (((1,) * CONTEXT, (1,) * 2), "exceed the model's context"),
    ],
)
def test_pairs_that_cannot_be_scored_are_named(engine, pair, message):
    with pytest.raises(HarnessError, match=f"pair 1: .*{message}"):
        engine.score([((1,), (2,)), pair])


def test_late_requests_start_when_they_arrive(engine):
    early, late = (GenerationRequest(f"{t}", (5, 6), SamplingParams(1), arrival_s=t) for t in (0.0, 0.5))
    results = {r.id: r for r in engine.generate([late, early])}
    assert results["0.0"].start_s < 0.2
    assert results["0.5"].start_s >= 0.5


def test_every_bit_of_a_seed_counts(engine):
    seeds = (5, 5 + (1 << 32), 5 + (1 << 63))
    drawn = {seed: one(engine, max_tokens=12, temperature=2.0, seed=seed, ignore_eos=True).tokens for seed in seeds}
    assert len(set(drawn.values())) == 3
    assert one(engine, max_tokens=12, temperature=2.0, seed=5, ignore_eos=True).tokens == drawn[5]


def test_a_temperature_may_be_a_whole_number(engine):
    asked = {"max_tokens": 4, "seed": 3, "ignore_eos": True}
    assert one(engine, temperature=2, **asked).tokens == one(engine, temperature=2.0, **asked).tokens


def test_a_temperature_near_zero_is_greedy(engine):
    greedy = one(engine, max_tokens=12, ignore_eos=True)
    assert one(engine, max_tokens=12, ignore_eos=True, temperature=1e-39, seed=1).tokens == greedy.tokens


@pytest.mark.parametrize(
    ("text", "too_early", "expected"),
    [("a.b.c", 0, 1), ("a.b.c", 1, 1), ("a.b.c", 2, 3), ("a.b.c", 4, None), ("xxENDyEND", 0, 2), ("xxENDyEND", 4, 2),
     ("xxENDyEND", 5, 6)],
)  # fmt: skip
def test_a_stop_string_counts_if_it_ends_late_enough(text, too_early, expected):
    asked = SamplingParams(stop=(".", "END"))
    assert asked.stop_at(text, too_early) == expected


def test_a_checkpoint_without_its_head_is_refused_by_all(tmp_path):
    folder = save(tmp_path / "m", "llama", tie_word_embeddings=False)
    drop_tensor(folder, "lm_head.weight")
    model = prepare(folder)
    for engine in (TransformersEngine(), AccelerateEngine(), OffloadEngine()):
        with pytest.raises(HarnessError, match=r"lm_head\.weight"):
            load(model, tmp_path / "cache", engine=engine)


def test_an_end_of_sequence_outside_the_vocabulary_is_left_out(tmp_path):
    model = tiny(tmp_path / "m", "llama", eos_token_id=VOCAB + 5, bos_token_id=VOCAB + 6)
    found = []
    for engine in (TransformersEngine(), OffloadEngine()):
        load(model, tmp_path / "cache", engine=engine)
        found.append(one(engine, max_tokens=5, ignore_eos=True).tokens)
        engine.close()
    assert found[0] == found[1]
