"""Accuracy tasks around a launch. Separate processes make the questions before it and judge the answers after it, so
that neither counts towards the launch's limits or times."""

import json
from collections.abc import Sequence
from pathlib import Path

from harness import registry
from harness.api import (
    Accuracy,
    AskTask,
    GenerationRequest,
    GenerationResult,
    HarnessError,
    JudgeTask,
    Score,
    TaskAnswers,
    from_json,
    to_json,
)
from harness.api.task import Answers, Circumstances, Questions, Report
from harness.common.files import replace_with


def ask(work: AskTask, report: Report) -> None:
    """Writes a task's questions. Raises HarnessError for broken data and for a model without a tokenizer."""
    name = work.spec.workload.task
    questions = registry.task(name).questions(_circumstances(work), report)
    if not (questions.prompts or questions.pairs):
        raise HarnessError(f"task {name} has no examples")
    replace_with(work.questions, json.dumps(to_json(questions)))


def read_questions(path: Path) -> Questions:
    """The questions that `ask` wrote."""
    return from_json(Questions, json.loads(path.read_text(encoding="utf-8")))


def answers_of(
    prompts: Sequence[GenerationRequest], results: Sequence[GenerationResult], scores: Sequence[Score]
) -> TaskAnswers:
    """A launch's answers, in the order of the questions."""
    by_id = {result.id: result.tokens for result in results}
    return TaskAnswers(tuple(by_id[p.id] for p in prompts), tuple(scores))


def judge(work: JudgeTask) -> Accuracy:
    """The task's figures for a launch's answers."""
    circumstances, task = _circumstances(work.asked), registry.task(work.asked.spec.workload.task)
    questions = read_questions(work.asked.questions)
    texts = [circumstances.tokens.decode(tokens) for tokens in work.answers.tokens]
    judged = task.judge(circumstances, Answers(texts, work.answers.scores))
    return Accuracy(
        task=task.name,
        protocol="; ".join(filter(None, (task.protocol, judged.version))),
        examples=questions.examples if judged.examples is None else judged.examples,
        figures=judged.figures,
        outcomes=judged.outcomes,
        weights=judged.weights,
        shortened=questions.shortened,
        truncated=questions.truncated,
        files=questions.files,
    )


def _circumstances(work: AskTask) -> Circumstances:
    count, model = work.spec.workload.num_requests, work.model
    return Circumstances(
        tokens=registry.text(work.spec.engine, model),
        context=model.shape.max_context,
        count=None if count == "auto" else count,
        folder=work.data,
        seed=work.spec.seed,
        model=Path(model.path) if model.path else None,
        cache=work.cache,
    )
