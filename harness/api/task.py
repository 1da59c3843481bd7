"""What an accuracy task is: questions for a model made from data, and figures from its answers to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from harness.api.engine import GenerationRequest, Score

#: To be told how many examples are ready, and of how many.
Report = Callable[[int, int], None]
#: Token ids of a context, which may be empty, and of what goes on from it.
Pair = tuple[tuple[int, ...], tuple[int, ...]]


class Tokens(Protocol):
    """Text to a model's token ids and back."""

    @property
    def begin(self) -> int:
        """What stands before a text that has no context: the beginning of a sequence, else its end."""
        ...

    @property
    def end(self) -> int:
        """The end of a sequence."""
        ...

    def encode(self, prompt: str) -> tuple[int, ...]:
        """With the special tokens that the model expects around a text."""
        ...

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Without any."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        ...


class Text(Tokens, Protocol):
    """A model's tokenizer as batch jobs use it."""

    def problem(self) -> str:
        """In what the tokenizer and the model disagree; empty where they agree."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """By the model's chat template, up to where the answer begins. Raises HarnessError."""
        ...

    def token(self, token: int) -> str:
        """One token's text as in the middle of others, or its name where it is only a part of a character."""
        ...


@dataclass(frozen=True)
class Questions:
    """What a task asks of a model: texts to go on from, and continuations to score.

    `examples`: how many they are made from. `shortened`: prompts that were too long and lost worked examples;
    `truncated`: those that lost their beginning. `files`: SHA-256 of what was read, by name.
    """

    prompts: tuple[GenerationRequest, ...] = ()
    pairs: tuple[Pair, ...] = ()
    examples: int = 0
    shortened: int = 0
    truncated: int = 0
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Tokens of each before and after which the model is asked."""
        asked = [(len(r.prompt), r.sampling.max_tokens) for r in self.prompts]
        return asked + [(len(context) + len(continuation), 0) for context, continuation in self.pairs]

    @property
    def max_sequence(self) -> int:
        """Tokens that a sequence has at most."""
        return max(map(sum, self.lengths))

    @property
    def mean_sequence(self) -> int:
        """Tokens that are cached of a sequence on average over its life."""
        return sum(prompt + generated // 2 for prompt, generated in self.lengths) // len(self.lengths)


@dataclass(frozen=True)
class Answers:
    """A model's: the text that goes on from each prompt, and the score of each pair."""

    texts: Sequence[str] = ()
    scores: Sequence[Score] = ()


@dataclass(frozen=True)
class Judged:
    """Figures over answers: means, each with its `_stderr`, and what else there is; `outcomes`: of each example, in
    order, what the means are of, and `weights`: what each counts for, where not all count alike.

    Figures named `*perplexity` have mean log-likelihoods, in nats, for outcomes. `examples`: of how many, where that is
    not how many were asked. `version`: which of the task's versions and data, in words, beyond `files`.
    """

    figures: Mapping[str, float]
    outcomes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    weights: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    examples: int | None = None
    version: str = ""


@dataclass(frozen=True)
class Circumstances:
    """For which model a task asks: its tokens, its `context` in tokens; and of how many examples (None: all), from
    which folder of data (None: from the Hugging Face hub), under which seed.

    `model` is the folder of its tokenizer, where it has one; `cache` one for what is kept between runs.
    """

    tokens: Tokens
    context: int
    count: int | None = None
    folder: Path | None = None
    seed: int = 0
    model: Path | None = None
    cache: Path | None = None


@runtime_checkable
class Task(Protocol):
    """Questions and what answers to them are worth. `protocol`: what a reader must know to compare its figures."""

    @property
    def name(self) -> str: ...

    @property
    def protocol(self) -> str: ...

    def questions(self, given: Circumstances, report: Report) -> Questions:
        """The same for the same circumstances. Raises HarnessError for data that are missing or broken."""
        ...

    def judge(self, given: Circumstances, answers: Answers) -> Judged:
        """What answers to those questions are worth."""
        ...
