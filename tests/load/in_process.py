"""The same questions asked of the engine without a server: what each answer has to be, and how fast it goes.

`python -m tests.load.in_process SETTINGS QUESTIONS CLIENTS RESULT` runs it in a process of its own.
"""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.api import FinishedEvent, OnlineEngine
from harness.batch.job import job_cell
from harness.batch.session import ModelSession
from harness.serve.answers import Answer
from harness.serve.requests import parse, requests_for
from harness.serve.server import online_engine
from harness.serve.settings import ServeSettings
from tests.load.questions import Answers, Question, whole_answers
from tests.load.server import anonymous_bytes


@dataclass(frozen=True)
class Outcome:
    """`idle_bytes`: what the process holds before the model is loaded and after it is closed, the larger of both."""

    seconds: float
    tokens: int
    answers: dict[int, Answers]
    idle_bytes: int


def asked_directly(settings: ServeSettings, questions: Sequence[Question], clients: int, folder: Path) -> Outcome:
    """What the engine answers where so many questions are under way at a time."""
    given, result = folder / "questions.jsonl", folder / "in-process.json"
    given.write_text("".join(question.encoded() + "\n" for question in questions))
    told = json.dumps(asdict(settings), default=str)
    subprocess.run([sys.executable, "-m", "tests.load.in_process", told, given, str(clients), result], check=True)
    found = json.loads(result.read_text())
    answers = {int(n): tuple(map(tuple, choices)) for n, choices in found.pop("answers").items()}
    return Outcome(answers=answers, **found)


class _Quiet:
    def note(self, text: str) -> None: ...
    def advance(self, phase: str, done: int, total: int, tokens: int = 0) -> None: ...


def _run(settings: ServeSettings, questions: Sequence[Question], clients: int) -> Outcome:
    cell = job_cell(settings.model, settings.engine, settings.memory, settings.overrides, lambda _: None)
    before = anonymous_bytes("self")
    with closing(ModelSession(cell, settings.cache, _Quiet())) as session:
        engine, longest = online_engine(session, settings)
        answers = {}
        for question in questions:
            asked = parse(
                question.body, question.chat, question.number << 16, "", settings.max_tokens, settings.max_pending
            )
            requests = requests_for(asked, session.model.shape, session.text, longest)
            answers[question.number] = Answer("", asked, requests, "", session.text)
        seconds = _drive(engine, list(answers.values()), clients)
        whole = {number: answer.whole() for number, answer in answers.items()}
    gc.collect()
    tokens = sum(body["usage"]["completion_tokens"] for body in whole.values())
    found = {number: whole_answers(body["choices"]) for number, body in whole.items()}
    return Outcome(seconds, tokens, found, max(before, anonymous_bytes("self")))


def _drive(engine: OnlineEngine, answers: list[Answer], clients: int) -> float:
    """Answers all, as many clients at a time as are given; returns seconds."""
    waiting, owner = list(reversed(answers)), dict[str, Answer]()
    began = time.monotonic()

    def ask_next() -> None:
        if waiting:
            answer = waiting.pop()
            for request in answer.requests:
                owner[request.id] = answer
                engine.submit(request)

    for _ in range(clients):
        ask_next()
    while owner:
        for event in engine.step():
            if isinstance(event, FinishedEvent):
                answer = owner.pop(event.result.id)
                answer.finish(event)
                if answer.done:
                    ask_next()
    return time.monotonic() - began


def main(told: str, given: Path, clients: int, result: Path) -> None:
    settings: dict[str, Any] = json.loads(told)
    settings |= {"cache": Path(settings["cache"]), "overrides": tuple(settings["overrides"])}
    asked = [Question(**json.loads(line)) for line in given.read_text().splitlines()]
    result.write_text(json.dumps(asdict(_run(ServeSettings(**settings), asked, clients))))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
