"""Our engines behind lm-eval's command line: nothing is asked twice, and what a killed run left is used."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval")

from harness.api import GenerationRequest, HarnessError, SamplingParams, Score
from harness.api.task import Pair
from suites.lm_eval_models import AnswerCache, _model_class


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
    ready = Ready()
    model(ready, tmp_path).scores(PAIRS)
    assert ready.asked == [PAIRS[1]]
    last = Ready()
    model(last, tmp_path).scores(PAIRS)
    assert last.asked == []


def test_what_cannot_be_read_or_written_is_told(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xff")
    with pytest.raises(HarnessError, match=r"a\.jsonl: answers of an earlier run cannot be read.*remove the file"):
        AnswerCache(tmp_path / "a.jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(HarnessError, match="cannot be written"):
        model(Ready(), tmp_path / "file").scores(PAIRS)
