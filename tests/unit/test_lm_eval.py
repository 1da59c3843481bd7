"""lm-eval: what it asks as tokens and says as figures, and our engines behind its command line, where nothing is
asked twice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval")

from harness.api import GenerationRequest, HarnessError, SamplingParams, Score
from harness.api.task import Circumstances, Pair
from suites.lm_eval_models import AnswerCache, _model_class
from suites.tasks.lm_eval_bridge import _figures, _outcomes, _RecordingModel


class Words:
    """A token a word; a beginning, 1, is added before texts by `encode`, and is known as `<s>` in them."""

    begin, end = 1, 2

    def encode(self, prompt: str) -> tuple[int, ...]:
        return (1, *self.encode_plain(prompt))

    def encode_plain(self, text: str) -> tuple[int, ...]:
        return tuple(1 if word == "<s>" else 10 + len(word) for word in text.split())

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join("<s>" if token == 1 else "x" * (token - 10) for token in tokens)


class Plain(Words):
    """Adds nothing."""

    encode = Words.encode_plain


@pytest.mark.parametrize(
    ("tokens", "text", "added", "expected"),
    [
        (Words(), "a bb", None, [1, 11, 12]),
        (Words(), "<s> a", None, [1, 11]),
        (Words(), "a", True, [1, 11]),
        (Words(), "a", False, [11]),
        (Plain(), "a", None, [11]),
    ],
)
def test_a_beginning_is_added_where_the_tokenizer_does_so_and_never_twice(tokens, text, added, expected):
    assert _RecordingModel(Circumstances(tokens, 64)).tok_encode(text, added) == expected


def test_pairs_and_prompts_begin_as_the_tokenizer_begins_a_text():
    model = _RecordingModel(Circumstances(Words(), 64))
    assert tuple(model._encode_pair("a bb", " ccc")) == ([1, 11, 12], [13])
    assert model._windows("a bb") == [((1,), (1, 11, 12))]  # as lm-eval's own model: once as prefix, once as added
    assert model._prompt("a", {"until": ["."], "max_gen_toks": 4}).prompt == (1, 11)
    assert model._prompt("<s> a", {"max_new_tokens": 3}).prompt == (1, 11)
    assert model._prompt("a", {"max_new_tokens": 3}).sampling.max_tokens == 3


def sample(i: int, how: str, **metrics: Any) -> dict[str, Any]:
    return {"doc_id": i, "filter": how, "metrics": list(metrics), **metrics}


def test_answers_through_two_filters_are_two_figures():
    given = {"exact_match,strict": 0.5, "exact_match_stderr,strict": 0.1, "exact_match,none": 1, "alias": "x"}
    assert dict(_figures(given)) == {"exact_match,strict": 0.5, "exact_match,strict_stderr": 0.1, "exact_match": 1.0}
    worth = [(1, "strict", 0), (0, "strict", 1), (0, "none", 1), (1, "none", 1)]
    samples = [sample(i, how, exact_match=value) for i, how, value in worth]
    assert _outcomes(samples)[0] == {"exact_match,strict": (1.0, 0.0), "exact_match": (1.0, 1.0)}


def test_only_perplexities_have_sums_and_weights():
    samples = [
        sample(0, "none", word_perplexity=(-6.0, 3), f1=(1, 1)),
        sample(1, "none", word_perplexity=(-2.0, 4), f1=(0, 1)),
    ]
    assert _outcomes(samples) == ({"word_perplexity": (-2.0, -0.5)}, {"word_perplexity": (3.0, 4.0)})


class Ready:
    """Scores by length and counts what it is asked."""

    fingerprint = "f"
    context = 16
    tokens: Any = None

    def __init__(self) -> None:
        self.asked: list[object] = []

    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        self.asked += pairs
        return [Score(-float(len(context)), len(more) > 1) for context, more in pairs]

    def write(self, prompts: Sequence[GenerationRequest]) -> list[str]:
        self.asked += prompts
        return [f"{prompt.prompt[0]}" for prompt in prompts]


def model(ready: Ready, folder: Path) -> Any:
    return _model_class(lambda settings: ready, folder).create_from_arg_obj({"pretrained": "a b", "memory": "1GiB"})


PAIRS: list[Pair] = [((1, 2), (3,)), ((1,), (2, 3)), ((1, 2), (3,))]


def test_nothing_is_scored_twice_in_a_run_or_after_it(tmp_path):
    first, again = Ready(), Ready()
    expected = [Score(-2, False), Score(-1, True), Score(-2, False)]
    assert model(first, tmp_path).scores(PAIRS) == expected
    assert first.asked == PAIRS[:2]
    assert model(again, tmp_path).scores([*PAIRS, ((7,), (8,))]) == [*expected, Score(-1, False)]
    assert again.asked == [((7,), (8,))]


def test_texts_are_kept_by_prompt_and_by_how_they_are_asked_for(tmp_path):
    prompts = [GenerationRequest(str(i), (i,), SamplingParams(max_tokens=4)) for i in range(3)]
    assert model(Ready(), tmp_path).texts(prompts) == ["0", "1", "2"]
    again = Ready()
    longer = GenerationRequest("x", (1,), SamplingParams(max_tokens=5))
    assert model(again, tmp_path).texts([*prompts, longer]) == ["0", "1", "2", "1"]
    assert again.asked == [longer]


def test_a_killed_runs_half_line_costs_only_itself(tmp_path):
    path = tmp_path / "f.jsonl"
    model(Ready(), tmp_path).scores(PAIRS[:1])
    with path.open("a") as file:
        file.write('["half')
    for asked in ([PAIRS[1]], []):
        ready = Ready()
        model(ready, tmp_path).scores(PAIRS)
        assert ready.asked == asked


def test_answers_that_cannot_be_read_or_written_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xff")
    with pytest.raises(HarnessError, match=r"a\.jsonl: answers of an earlier run cannot be read.*remove the file"):
        AnswerCache(tmp_path / "a.jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(HarnessError, match="cannot be written"):
        model(Ready(), tmp_path / "file").scores(PAIRS)
