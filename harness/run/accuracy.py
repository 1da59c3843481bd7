"""Accuracy tasks around a launch: questions are made before it and answers judged after it, each in a process of its
own, so that neither the limits nor the times of the launch know of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import registry
from harness.api import (
    Accuracy,
    GenerationRequest,
    GenerationResult,
    HarnessError,
    LocalModel,
    RunSpec,
    Score,
    from_json,
    to_json,
)
from harness.api.task import Answers, Circumstances, Questions, Report
from harness.common.files import replace_with


def ask(spec: RunSpec, model: LocalModel, folder: Path | None, cache: Path, path: Path, report: Report) -> None:
    """Writes a cell's questions to `path`. Raises HarnessError for broken data and for a model without a tokenizer."""
    found = registry.task(spec.workload.task).questions(_given(spec, model, folder, cache), report)
    if not (found.prompts or found.pairs):
        raise HarnessError(f"task {spec.workload.task} has no examples")
    replace_with(path, json.dumps(to_json(found)))


def read_questions(path: Path) -> Questions:
    """What `ask` has written."""
    return from_json(Questions, json.loads(path.read_text(encoding="utf-8")))


def answers_of(
    prompts: Sequence[GenerationRequest], results: Sequence[GenerationResult], scores: Sequence[Score]
) -> dict[str, Any]:
    """A launch's answers as plain data, in the order of the questions."""
    by_id = {result.id: result.tokens for result in results}
    return {"tokens": [list(by_id[p.id]) for p in prompts], "scores": [[s.logprob, s.is_greedy] for s in scores]}


def judge(
    spec: RunSpec, model: LocalModel, folder: Path | None, cache: Path, path: Path, answers: Mapping[str, Any]
) -> Accuracy:
    """What answers to the questions in `path` are worth."""
    given, task, asked = _given(spec, model, folder, cache), registry.task(spec.workload.task), read_questions(path)
    texts = [given.tokens.decode(tokens) for tokens in answers["tokens"]]
    found = task.judge(given, Answers(texts, [Score(*score) for score in answers["scores"]]))
    return Accuracy(
        task=task.name,
        protocol="; ".join(filter(None, (task.protocol, found.version))),
        examples=asked.examples if found.examples is None else found.examples,
        figures=found.figures,
        outcomes=found.outcomes,
        weights=found.weights,
        shortened=asked.shortened,
        truncated=asked.truncated,
        files=asked.files,
    )


def _given(spec: RunSpec, model: LocalModel, folder: Path | None, cache: Path) -> Circumstances:
    count = spec.workload.num_requests
    return Circumstances(
        tokens=registry.text(spec.engine, model),
        context=model.shape.max_context,
        count=None if count == "auto" else count,
        folder=folder,
        seed=spec.seed,
        model=Path(model.path) if model.path else None,
        cache=cache,
    )
