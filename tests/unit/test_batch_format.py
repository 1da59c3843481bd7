"""The lines of a batch job: what they ask for where they leave something out, so that a job gives the same again."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.api import GenerationResult, SamplingParams
from harness.batch.format import BatchLine, Echo, LineError, answer, parse_body, parse_line, refusal

SEEDS, NUMBERS = st.integers(0, 2**31 - 1), st.integers(1, 2**31)


def parsed(settings: dict[str, Any], number: int = 1, seed: int = 0, max_tokens: int = 16) -> BatchLine:
    return parse_line(json.dumps(settings).encode(), number, max_tokens, seed)


def as_batch(url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": "c", "method": "POST", "url": url, "body": body}


@settings(max_examples=20)
@given(st.sets(st.tuples(SEEDS, NUMBERS), min_size=2, max_size=20))
def test_no_two_lines_of_a_job_and_no_two_jobs_draw_alike(pairs: set[tuple[int, int]]) -> None:
    """A line without a seed gets the same one whenever the job runs, and one that no other line or job has."""
    drawn = {pair: parsed({"prompt": "p"}, number=pair[1], seed=pair[0]).sampling.seed for pair in pairs}
    assert len(set(drawn.values())) == len(pairs)
    for (seed, number), value in drawn.items():
        again = (as_batch("/v1/completions", prompt="q"), {"messages": [{"role": "user", "content": "hi"}]})
        assert {parsed(line, number=number, seed=seed).sampling.seed for line in again} == {value}
        SamplingParams(1, seed=value)  # an engine takes it


def test_the_seeds_of_a_job_stay_what_they_were() -> None:
    """Answers of an earlier release of a job that goes on: seed 0 has line numbers, others begin where these end."""
    assert [parsed({"prompt": "p"}, number, 0).sampling.seed for number in (1, 2, 77)] == [1, 2, 77]
    assert parsed({"prompt": "p"}, 5, 7).sampling.seed == 7 * 4294967296 + 5


@pytest.mark.parametrize("own", [0, 3])
def test_a_seed_of_its_own_is_taken_as_it_is(own: int) -> None:
    assert parsed({"prompt": "p", "seed": own}, number=9, seed=4).sampling.seed == own


def test_what_a_line_leaves_out_is_the_format_s_and_the_job_s() -> None:
    """OpenAI's lines are sampled at temperature 1, plain ones decode greedily; zero is a value and not left out."""
    plain, completion = parsed({"prompt": "p"}), parsed(as_batch("/v1/completions", prompt=[5, 6]))
    chat = parsed(as_batch("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}]))
    assert [line.sampling.temperature for line in (plain, completion, chat)] == [0.0, 1.0, 1.0]
    assert [line.sampling.max_tokens for line in (plain, completion, chat)] == [16, 16, 16]
    assert [line.id for line in (plain, completion, chat)] == [None, "c", "c"]
    assert (plain.prompt, completion.prompt, chat.prompt) == ("p", (5, 6), ())
    assert chat.messages == ({"role": "user", "content": "hi"},)
    for line in (plain, completion, chat):
        asked = line.sampling
        assert (asked.top_p, asked.top_k, asked.min_p, asked.min_tokens) == (1.0, 0, 0.0, 0)
        assert (asked.stop, asked.logprobs, asked.json_schema, line.samples, line.echo) == ((), None, None, 1, False)
        assert not asked.ignore_eos and not asked.prompt_logprobs
    cold = parsed(as_batch("/v1/completions", prompt="p", temperature=0, max_tokens=3, n=4, stop="x", top_p=0.5))
    assert (cold.sampling.temperature, cold.sampling.max_tokens, cold.samples) == (0.0, 3, 4)
    assert (cold.sampling.stop, cold.sampling.top_p) == (("x",), 0.5)


def test_chats_have_a_limit_and_log_probabilities_by_names_of_their_own() -> None:
    hi = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    both = parsed({"messages": hi, "max_tokens": 9, "max_completion_tokens": 4})
    assert both.sampling.max_tokens == 4
    assert both.messages[0]["content"] == "ab"
    for asked, expected in (({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0),
                            ({"logprobs": True, "top_logprobs": 3}, 3)):  # fmt: skip
        assert parsed({"messages": hi, **asked}).sampling.logprobs == expected
    with pytest.raises(LineError, match="top_logprobs needs logprobs: true"):
        parsed({"messages": hi, "top_logprobs": 3})
    scored = parsed({"prompt": "p", "echo": True, "logprobs": 0})
    assert (scored.sampling.logprobs, scored.sampling.prompt_logprobs, scored.echo) == (0, True, True)
    assert not parsed({"prompt": "p", "echo": True}).sampling.prompt_logprobs


def test_forms_of_an_answer() -> None:
    def form(**settings: Any) -> str | None:
        return parsed({"prompt": "p", "response_format": settings}).sampling.json_schema

    assert form(type="text") is None
    assert json.loads(form(type="json_object") or "") == {"type": "object"}
    schema = {"type": "object", "required": ["a"]}
    assert json.loads(form(type="json_schema", json_schema={"name": "n", "schema": schema}) or "") == schema
    for wrong in ({"type": "json_schema"}, {"type": "text", "json_schema": {"name": "n", "schema": {}}}):
        with pytest.raises(LineError, match="json_schema goes with type json_schema"):
            form(**wrong)


def test_limits_of_the_format_hold_to_the_last() -> None:
    """128 samples and 20 alternatives, as OpenAI has them."""
    assert parsed({"prompt": "p", "n": 128, "logprobs": 20}).samples == 128
    for wrong in ({"n": 129}, {"n": 0}, {"logprobs": 21}, {"logprobs": -1}):
        with pytest.raises(LineError, match=next(iter(wrong))):
            parsed({"prompt": "p", **wrong})


def test_a_mistake_keeps_the_id_of_its_line() -> None:
    with pytest.raises(LineError, match=r"body\.promt is not a known setting; did you mean 'prompt'\?") as caught:
        parsed(as_batch("/v1/completions", promt="p"))
    assert caught.value.id == "c"
    assert refusal(3, caught.value.id, str(caught.value)) == {
        "line": 3, "custom_id": "c", "response": None,
        "error": {"code": "invalid_request", "message": str(caught.value)},
    }  # fmt: skip
    with pytest.raises(LineError, match="custom_id: expected a string that is not empty") as caught:
        parsed({"prompt": "p", "custom_id": ""})
    assert caught.value.id is None
    with pytest.raises(LineError, match=r"^tools: functions are not called"):
        parsed({"messages": [{"role": "user", "content": "hi"}], "tools": []})
    with pytest.raises(LineError, match="stop: an empty string"):
        parsed({"prompt": "p", "stop": ["x", ""]})
    assert len(parsed({"prompt": "p", "stop": ["x" * 1024] * 64}).sampling.stop) == 64
    for stop in ("x" * 1025, ["x"] * 65):
        with pytest.raises(LineError, match="stop: expected at most 64 strings of at most 1024 characters"):
            parsed({"prompt": "p", "stop": stop})


def test_an_answer_counts_the_prompt_once_and_the_tokens_of_all_samples() -> None:
    line = parsed({"prompt": "p", "n": 2, "custom_id": "c"}, number=8)
    results = [GenerationResult(str(i), tokens, 0.0, (1.0,) * len(tokens), prompt_tokens=3)
               for i, tokens in enumerate(((7, 8), (9,)))]  # fmt: skip
    found = answer(line, "m", results, ["ab", "c"], str)
    body = found["response"]["body"]
    assert (found["line"], found["custom_id"], found["error"], body["model"]) == (8, "c", None, "m")
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "ab", "length"), (1, "c", "length")
    ]  # fmt: skip
    echoed = answer(line, "m", results, ["ab", "c"], str, Echo("p", (5,)))
    assert [c["text"] for c in echoed["response"]["body"]["choices"]] == ["pab", "pc"]
    assert answer(line, "m", results[:1], ["ab"], str)["response"]["body"]["usage"]["total_tokens"] == 5


def test_a_body_by_itself_is_unicode_too() -> None:
    with pytest.raises(LineError, match="is not Unicode text"):
        parse_body({"prompt": "a\ud800"}, False, 1, 16, 0)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"prompt": ["w"] * 30_000}, "prompt: expected a string or a list of token ids"),
        ({"prompt": "w", "stop": [1] * 30_000}, "stop: expected a string or a list of strings"),
        ({"messages": [{}] * 30_000}, "messages.0.role is missing"),
        ({"prompt": "w"} | {f"k{i}": 1 for i in range(30_000)}, "k0 is not a known setting"),
        ({"messages": [{f"k{i}": 1 for i in range(30_000)}]}, "messages.0: has 30000 settings, more than there are"),
    ],
    ids=["ids", "stops", "messages", "keys", "keys of a message"],
)
def test_of_many_errors_the_first_is_told_and_the_others_take_no_memory(line: dict[str, Any], told: str) -> None:
    """A line has 16 MiB at most: with an error for each of its items it took gigabytes."""
    raw = json.dumps(line).encode()
    tracemalloc.start()
    try:
        with pytest.raises(LineError, match=f"^{told}"):
            parse_line(raw, 1, 16, 0)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
