"""The base of generation tasks: turns examples into requests that fit a model's context, and evaluates the texts."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from harness.api import GenerationRequest, HarnessError, SamplingParams
from harness.api.task import Answers, Circumstances, Judged, Questions, Report, Tokens


@dataclass(frozen=True)
class Example:
    """A prompt and its correct answers. `shorter`: the prompt with ever fewer worked examples, where it is too long.
    `key`: identifies the question where several prompts ask it."""

    prompt: str
    answers: tuple[str, ...]
    shorter: tuple[str, ...] = ()
    key: int = -1


@dataclass(frozen=True)
class Material:
    """The examples of a task, and the SHA-256 of each source file by name."""

    examples: Sequence[Example]
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptTask(ABC):
    """A task whose examples are prompts to complete.

    `max_tokens`, `stop` and `temperature` are the sampling parameters, `outputs` the number of answers to a prompt.
    """

    name: str
    max_tokens: int
    _: KW_ONLY
    stop: tuple[str, ...] = ("\n",)
    temperature: float = 0.0
    outputs: int = 1

    @abstractmethod
    def material(self, folder: Path | None) -> Material:
        """All examples in order, from files under `folder` or else from the Hugging Face hub.

        Raises HarnessError for missing or damaged data.
        """

    @abstractmethod
    def evaluate(self, examples: Sequence[Example], answers: Sequence[Sequence[str]]) -> Judged:
        """The figures of the answers, `outputs` to each example."""

    def questions(self, given: Circumstances, report: Report) -> Questions:
        """See harness.api.task.Task. A prompt that is too long loses worked examples first, then its beginning."""
        room = room_beside(self.max_tokens, given.context, self.name)
        material = self.material(given.folder)
        examples = material.examples[: given.count]
        prompts: list[GenerationRequest] = []
        shortened = truncated = 0
        for i, example in enumerate(examples):
            report(i, len(examples))
            ids, lost = _fitting(example, given.tokens, room)
            shortened += lost > 0
            truncated += len(ids) > room
            # as in lm-eval, keep the end of the prompt, where the question is
            prompts += [self._request(given.seed, i, k, ids[-room:]) for k in range(self.outputs)]
        return Questions(tuple(prompts), (), len(examples), shortened, truncated, material.files)

    def judge(self, given: Circumstances, answers: Answers) -> Judged:
        """See harness.api.task.Task."""
        examples = self.material(given.folder).examples[: given.count]
        stopping = SamplingParams(stop=self.stop)
        # engines return the tokens that complete a stop string
        texts = [text[: stopping.stop_at(text)] for text in answers.texts]
        return self.evaluate(examples, [texts[i : i + self.outputs] for i in range(0, len(texts), self.outputs)])

    def _request(self, seed: int, example: int, answer: int, ids: tuple[int, ...]) -> GenerationRequest:
        sampling = SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, stop=self.stop,
                                  seed=request_seed(seed, example, answer))  # fmt: skip
        return GenerationRequest(f"e{example:06d}.{answer}", ids, sampling)


def room_beside(max_tokens: int, context: int, task: str) -> int:
    """The most tokens of a prompt to which `max_tokens` are added. Raises HarnessError where none are left."""
    if max_tokens >= context:
        raise HarnessError(f"{task} needs {max_tokens} new tokens, which leave no room for a prompt in the model's "
                           f"context of {context}")  # fmt: skip
    return context - max_tokens


def request_seed(seed: int, *indices: int) -> int:
    """A reproducible seed of 31 bits, from the cell's seed and the request's indices (example, answer)."""
    digest = hashlib.sha256("/".join(map(str, (seed, *indices))).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _fitting(example: Example, tokens: Tokens, room: int) -> tuple[tuple[int, ...], int]:
    """Token ids of the longest form of a prompt that fits, or else of the shortest, and the worked examples it lost."""
    ids, lost = tokens.encode(example.prompt), 0
    while len(ids) > room and lost < len(example.shorter):
        ids, lost = tokens.encode(example.shorter[lost]), lost + 1
    return ids, lost
