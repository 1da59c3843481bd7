"""The Python API on the fake engine: answers, streams, scores and refusals, and an import that loads nothing."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from engines.adapters.fake import SHAPE, FakeText
from harness.api import GenerationResult, HarnessError, InfeasibleError, SamplingParams
from harness.batch.job import Lengths
from harness.batch.texts import GrowingText, generated_text, pair_of
from offload_harness import Engine


@pytest.fixture
def engine(tmp_path):
    with Engine("fake", "1GiB", engine="fake", cache_dir=tmp_path) as opened:
        yield opened


def test_the_import_loads_nothing_heavy():
    script = (
        "import sys, offload_harness\n"
        "heavy = {'torch', 'numpy', 'pandas', 'jinja2', 'pydantic', 'rich', 'click', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert 'Engine' in dir(offload_harness)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_kind_of_prompt_is_answered_in_order(engine):
    chat = [{"role": "user", "content": "hi"}]
    answers = engine.generate(["hi", [104, 105], chat], max_tokens=5)
    assert [len(a.tokens) for a in answers] == [5, 5, 5]
    assert [a.prompt_tokens for a in answers] == [2, 2, len("user: hi\n")]
    assert answers[0].finish_reason == "length" and answers[0].text == FakeText(None).decode(answers[0].tokens)
    assert all(a.start_s <= a.token_times_s[0] and len(a.token_times_s) == 5 for a in answers)
    for alone in ("hi", [104, 105], chat):
        assert len(engine.generate(alone, max_tokens=2)) == 1
    assert engine.generate([]) == []


def test_a_form_of_the_answer_reaches_the_engine(engine):
    """The fake engine cannot follow one, and says so; nobody is told of a setting that is not the API's."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}
    with pytest.raises(HarnessError, match="json_schema"):
        engine.generate("hi", max_tokens=5, response_format=form)
    with pytest.raises(HarnessError, match=r"response_format\.type"):
        engine.generate("hi", max_tokens=5, response_format={"type": "xml"})
    for setting in ("json_schema", "prompt_logprobs"):
        with pytest.raises(HarnessError, match=f"^{setting} is not a known setting"):
            engine.generate("hi", **{setting: "x"})


def test_the_same_call_gives_the_same_answers_and_a_seed_changes_them(engine):
    first = engine.generate(["a", "b"], max_tokens=4)
    assert engine.generate(["a", "b"], max_tokens=4) == first
    assert engine.generate(["a"], max_tokens=4, seed=7)[0].tokens != first[0].tokens


def test_a_stream_is_the_same_text_in_pieces(engine):
    pieces = list(engine.stream("hi", max_tokens=6))
    assert len(pieces) == 6
    assert "".join(pieces) == engine.generate("hi", max_tokens=6)[0].text
    with pytest.raises(HarnessError, match="prompt 1: "):
        engine.stream("")


def test_a_stream_that_nobody_reads_to_its_end_is_cancelled(engine):
    stream = engine.stream("hi", max_tokens=50)
    next(stream)
    stream.close()
    running = engine._session.engine(Lengths(1, 1, 1), 1).stats()
    assert (running.waiting, running.running) == (0, 0)
    assert "".join(engine.stream("hi", max_tokens=3)) == engine.generate("hi", max_tokens=3)[0].text


def test_scores_are_the_engines_own(engine):
    (answer,) = engine.generate([[5, 6]], max_tokens=2, seed=0)
    good, bad = engine.score([([5, 6], answer.tokens), ("ab", " c")])
    assert good.is_greedy and good.logprob < 0
    assert not bad.is_greedy
    assert engine.score([]) == []


@pytest.mark.parametrize(
    ("prompt", "sampling", "told"),
    [
        ("x", {"max_token": 3}, "did you mean 'max_tokens'"),
        ("x", {"n": 2}, "n is not a known setting"),
        ("x", {"temperature": -1}, "prompt 1: temperature is -1"),
        ("x", {"max_tokens": 5000}, "exceed the model's context of 4096"),
        ("x", {"stop": 3}, "stop: expected a string or a list of strings"),
        ([], {}, "prompt 1: "),
        ([[1, 5000]], {}, "prompt 1: "),
        ([[{"role": "wizard", "content": "x"}]], {}, "messages"),
        ([3.5], {}, "prompt 1: "),
        ([object()], {}, "prompt 1: expected text"),
        (None, {}, "prompts: expected text, token ids, messages or a list of these, got None"),
        ({"role": "user"}, {}, "prompts: expected text"),
        (b"x", {}, "prompts: expected text"),
        ("x", {"logprobs": "x"}, "logprobs: expected a count of alternatives, got 'x'"),
        ("x", {"logprobs": True}, "logprobs: expected a count of alternatives, got True"),
    ],
)
def test_a_refusal_is_one_line_that_names_prompt_and_setting(engine, prompt, sampling, told):
    if prompt == []:
        prompt = [[]]
    with pytest.raises(HarnessError, match=told) as error:
        engine.generate(prompt, **sampling)
    assert "\n" not in str(error.value)
    assert len(engine.generate("still there", max_tokens=1)) == 1


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"engine": "offlod"}, "unknown engine 'offlod'"),
        ({"memory": "lots"}, "expected a size"),
        ({"policy": {"shedule": "row"}}, "schedule"),
        ({"policy": {"schedule": "sweep"}}, "schedule"),  # which the fake engine has not
        ({"policy": "max_batch"}, "policy"),
        ({"options": {"no_such": 1}}, "no_such"),
        ({"device_memory": "4GiB"}, "device_memory"),
        ({"model": ""}, "model"),
        ({"model": None}, "model: expected a folder, a name or a mapping as in a suite, got None"),
        ({"model": ["fake"]}, "model: expected a folder"),
        ({"policy": {"threads": {1}}}, "settings: expected texts, numbers, lists and mappings as in a suite"),
        ({"model": {"weights": "dummy"}}, "model"),
        ({"cache_dir": "/dev/null/x"}, "/dev/null/x"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, settings, told):
    given_settings = {"model": "fake", "memory": "1GiB", "engine": "fake", "cache_dir": tmp_path} | settings
    with pytest.raises(HarnessError, match=told), Engine(**given_settings) as engine:
        engine.generate("x", max_tokens=1)


def test_a_model_may_be_a_path(tmp_path):
    with Engine(Path("fake"), "1GiB", engine="fake", cache_dir=tmp_path) as engine:
        assert engine.generate("x", max_tokens=1)


@pytest.mark.parametrize("pair", [("caf\udce9", "x"), ("x", "caf\udce9"), ("caf\udce9", [1]), ([1], "\ud800")])
def test_half_a_character_is_not_scored(engine, pair):
    with pytest.raises(HarnessError, match="a text to score is not Unicode text"):
        engine.score([pair])


def test_the_engine_is_loaded_with_room_and_without_it_where_there_is_none(tmp_path):
    with Engine("fake", "1GiB", engine="fake", options={"longest": 40}, cache_dir=tmp_path) as engine:
        assert len(engine.generate([[1] * 30], max_tokens=10)[0].tokens) == 10
        with pytest.raises(InfeasibleError, match="not 41"):
            engine.generate([[1] * 31], max_tokens=10)
        assert len(engine.generate([[1] * 3], max_tokens=1)) == 1


def test_an_engine_that_fails_says_so_in_one_line(tmp_path):
    with (
        Engine("fake", "1GiB", engine="fake", options={"crash": "exception"}, cache_dir=tmp_path) as engine,
        pytest.raises(HarnessError, match=r"engine fake failed \(error\): RuntimeError"),
    ):
        engine.generate("x", max_tokens=1)
    engine.close()


TEXT = FakeText(None)
LETTERS = st.lists(st.sampled_from([ord(c) for c in "abc "] + [7]), min_size=1, max_size=12)


@given(LETTERS, st.lists(st.text("abc", min_size=1, max_size=3), max_size=2), st.integers(0, 6))
def test_the_pieces_of_a_stream_are_the_text_wherever_it_stops(tokens, stops, least):
    """Also with stop strings, of which no piece shows any part of the one that ends the text."""
    sampling = SamplingParams(max_tokens=len(tokens), min_tokens=min(least, len(tokens)), stop=tuple(stops))
    for count in range(1, len(tokens) + 1):  # as engines do: the first stop string that is complete late enough
        early = len(TEXT.decode(tokens[: max(0, sampling.min_tokens - 1)]))
        if count >= sampling.min_tokens and sampling.stop_at(TEXT.decode(tokens[:count]), early) is not None:
            break
    stopped = sampling.stop_at(TEXT.decode(tokens[:count]), early) is not None and count >= sampling.min_tokens
    result = GenerationResult("r", tuple(tokens[:count]), 0.0, (0.0,) * count, 1)
    result = replace(result, finish_reason="stop" if stopped else "length")
    growing = GrowingText(TEXT, sampling)
    pieces = [growing.add(token) for token in result.tokens] + [growing.end(result)]
    assert "".join(pieces) == generated_text(TEXT, result, sampling)


class Bytes(FakeText):
    """Byte by byte, as GPT-2's tokenizer."""

    def ids(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")


class Pieces(FakeText):
    """As LLaMA's tokenizer: a space begins a piece, and is stripped from a text; other characters are bytes, of which a
    run is characters or none."""

    PIECES = ("▁", "▁a", "a", ".", *(f"<0x{byte:02X}>" for byte in range(256)))
    DECODER = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )

    def ids(self, text):
        pieces = re.findall("▁a|.", text.replace(" ", "▁"), re.DOTALL)
        return [
            token
            for piece in pieces
            for token in ([self.PIECES.index(piece)] if piece in self.PIECES else [4 + b for b in piece.encode()])
        ]

    def decode(self, tokens):
        return self.DECODER.decode([self.PIECES[token] for token in tokens])


@given(st.sampled_from([Bytes(None), Pieces(None)]), st.text(" a.é€𝄞", min_size=40, max_size=120))
def test_the_pieces_of_a_long_text_are_the_text(text, expected):
    """Whose beginning is not decoded again with every token, in the middle of whatever characters."""
    tokens, growing, lengths = tuple(text.ids(expected)), GrowingText(text, SamplingParams()), []
    with mock.patch.object(text, "decode", lambda ids: lengths.append(len(ids)) or type(text).decode(text, ids)):
        pieces = [growing.add(token) for token in tokens]
    result = GenerationResult("r", tokens, 0.0, (0.0,) * len(tokens), 1)
    assert "".join(pieces) + growing.end(result) == text.decode(tokens)
    assert len(tokens) < 100 or sorted(lengths)[len(lengths) // 2] <= 60


def test_half_a_character_is_held_back():
    growing = GrowingText(Bytes(None), SamplingParams())
    assert [growing.add(t) for t in "é!".encode()] == ["", "é", "!"]


@pytest.mark.parametrize("stop", ["é", "用户", "a用"])
def test_a_stop_string_whose_last_character_comes_in_parts_is_not_shown(stop):
    text, growing = Bytes(None), GrowingText(Bytes(None), SamplingParams(stop=(stop,)))
    tokens = tuple(("xa" + stop.removeprefix("a")).encode())
    pieces = [growing.add(token) for token in tokens]
    result = GenerationResult("r", tokens, 0.0, (0.0,) * len(tokens), 1, finish_reason="stop")
    whole = generated_text(text, result, SamplingParams(stop=(stop,)))
    assert "".join(pieces) + growing.end(result) == whole == ("xa" + stop.removeprefix("a")).partition(stop)[0]


def test_spaces_between_a_pair_belong_to_the_continuation():
    assert pair_of(TEXT, "ab ", "c") == pair_of(TEXT, "ab", " c") == ((97, 98), (32, 99))
    assert pair_of(TEXT, "", "c") == ((), (99,))
    assert pair_of(TEXT, (1, 2), "c") == ((1, 2), (99,))


def test_the_context_is_the_models(engine):
    assert engine.context == SHAPE.max_context
