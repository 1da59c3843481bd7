"""Accuracy tasks around a launch. Separate processes make the questions before it and judge the answers after it, so
that neither counts towards the launch's limits or times."""

import json
from collections.abc import Sequence
from pathlib import Path

from harness import api, registry
from harness.api.task import Answers, Circumstances, Questions, Report
from harness.common.files import replace_with


def ask(work: api.AskTask, report: Report) -> None:
    """Writes a task's questions. Raises HarnessError for broken data and for a model without a tokenizer."""
    name = work.spec.workload.task
    questions = registry.task(name).questions(_circumstances(work), report)
    if not (questions.prompts or questions.pairs):
        raise api.HarnessError(f"task {name} has no examples")
    replace_with(work.questions, json.dumps(api.to_json(questions)))


def read_questions(path: Path) -> Questions:
    """The questions that `ask` wrote."""
    return api.from_json(Questions, json.loads(path.read_text(encoding="utf-8")))


def answers_of(
    prompts: Sequence[api.GenerationRequest], results: Sequence[api.GenerationResult], scores: Sequence[api.Score]
) -> api.TaskAnswers:
    """A launch's answers, in the order of the questions."""
    by_id = {result.id: result.tokens for result in results}
    return api.TaskAnswers(tuple(by_id[p.id] for p in prompts), tuple(scores))


def judge(work: api.JudgeTask) -> api.Accuracy:
    """The task's figures for a launch's answers."""
    circumstances, task = _circumstances(work.asked), registry.task(work.asked.spec.workload.task)
    questions = read_questions(work.asked.questions)
    texts = [circumstances.tokens.decode(tokens) for tokens in work.answers.tokens]
    judged = task.judge(circumstances, Answers(texts, work.answers.scores))
    return api.Accuracy(
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


def _circumstances(work: api.AskTask) -> Circumstances:
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
