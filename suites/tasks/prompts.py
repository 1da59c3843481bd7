"""Tasks of prompts: examples become requests that fit a model's context, and a model's texts are judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.api import GenerationRequest, HarnessError, SamplingParams
from harness.api.task import Answers, Circumstances, Judged, Questions, Report, Tokens
from suites.seeds import own_seed


@dataclass(frozen=True)
class Example:
    """One prompt and its right answers, any of which counts. `shorter`: with fewer and fewer worked examples, for where
    it is too long; `key`: which question it asks, where several ask the same one."""

    prompt: str
    answers: tuple[str, ...]
    shorter: tuple[str, ...] = ()
    key: int = -1


@dataclass(frozen=True)
class Material:
    """The examples of a task, and the SHA-256 of each file that they were made from, by name."""

    examples: Sequence[Example]
    files: Mapping[str, str] = field(default_factory=dict)


class PromptTask(ABC):
    """A task whose examples are prompts that a model goes on from.

    `max_tokens`, `stop` and `temperature` say how the model answers, `outputs` how often.
    """

    name: str
    max_tokens: int
    stop: tuple[str, ...]
    temperature: float
    outputs: int

    @abstractmethod
    def material(self, folder: Path | None) -> Material:
        """All examples, in their order: from files under `folder`, else from the Hugging Face hub.

        Raises HarnessError for what is missing or broken.
        """

    @abstractmethod
    def worth(self, examples: Sequence[Example], answers: Sequence[Sequence[str]]) -> Judged:
        """What answers to examples, `outputs` to each, are worth."""

    def questions(self, given: Circumstances, report: Report) -> Questions:
        """See harness.api.task.Task. A prompt that is too long loses worked examples, then its beginning."""
        room = given.context - self.max_tokens
        if room < 1:
            raise HarnessError(f"task {self.name}: the model's context of {given.context} tokens leaves no room for a "
                               f"prompt beside {self.max_tokens} new ones")  # fmt: skip
        material = self.material(given.folder)
        examples = material.examples[: given.count]
        prompts: list[GenerationRequest] = []
        shortened = truncated = 0
        for i, example in enumerate(examples):
            report(i, len(examples))
            ids, lost = _fitting(example, given.tokens, room)
            shortened += lost > 0
            truncated += len(ids) > room
            # as lm-eval does: the question is at the end
            prompts += [self._request(given.seed, i, k, ids[-room:]) for k in range(self.outputs)]
        return Questions(tuple(prompts), (), len(examples), shortened, truncated, material.files)

    def judge(self, given: Circumstances, answers: Answers) -> Judged:
        """See harness.api.task.Task."""
        examples = self.material(given.folder).examples[: given.count]
        texts = [self._cut(text) for text in answers.texts]
        return self.worth(examples, [texts[i : i + self.outputs] for i in range(0, len(texts), self.outputs)])

    def _request(self, seed: int, example: int, answer: int, ids: tuple[int, ...]) -> GenerationRequest:
        sampling = SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, stop=self.stop,
                                  seed=own_seed(seed, example, answer))  # fmt: skip
        return GenerationRequest(f"e{example:06d}.{answer}", ids, sampling)

    def _cut(self, text: str) -> str:
        """An answer up to the first stop string: engines give the tokens that complete it."""
        at = SamplingParams(stop=self.stop).stop_at(text)
        return text if at is None else text[:at]


def _fitting(example: Example, tokens: Tokens, room: int) -> tuple[tuple[int, ...], int]:
    """The longest form of a prompt that has room, else the shortest there is; and how many worked examples it lost."""
    ids, lost = tokens.encode(example.prompt), 0
    while len(ids) > room and lost < len(example.shorter):
        ids, lost = tokens.encode(example.shorter[lost]), lost + 1
    return ids, lost
