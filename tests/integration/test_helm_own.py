"""crfm-helm itself, where it is installed: our prompts are its prompts, and our metrics its metrics."""

import os
from pathlib import Path

import pytest

from engines.common.text import Text
from harness.api.task import Answers, Circumstances
from suites.tasks import task

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "HARNESS_HELM_PYTHON" not in os.environ, reason="needs HARNESS_HELM_PYTHON (docs/guides/accuracy.md)"
    ),
]
COUNT = 12


@pytest.mark.parametrize(
    ("entry", "metric", "max_tokens"),
    [
        ("synthetic_reasoning_natural:difficulty=easy", "exact_set_match", 20),
        ("synthetic_reasoning:mode=pattern_match", "quasi_exact_match", 50),
    ],
)
def test_helm_asks_and_judges_through_our_client(smollm2, tmp_path, entry, metric, max_tokens):
    tokens = Text(smollm2)
    given = Circumstances(tokens, 2048, COUNT, model=Path(smollm2.path), cache=tmp_path)
    one = task(f"helm_run:{entry}")
    questions = one.questions(given, lambda done, total: None)
    assert len(questions.prompts) == questions.examples == COUNT
    for request in questions.prompts:
        text = tokens.decode(request.prompt)
        assert text.startswith("Please solve the following problem.\n")
        assert request.sampling.max_tokens == max_tokens
        assert request.sampling.stop == ("\n",)
    nothing = one.judge(given, Answers(texts=[""] * COUNT))
    assert nothing.figures[metric] == 0.0
    assert 0 < len(nothing.outcomes[metric]) <= COUNT
