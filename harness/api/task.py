"""The contract of accuracy tasks: a task makes questions for a model from data, and figures from its answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from harness.api.engine import GenerationRequest, Score
from harness.api.machine import mean_cached_length, mean_generated

#: Progress: called with the number of examples that are ready, and of all.
Report = Callable[[int, int], None]
#: Token ids of a context, which may be empty, and of its continuation.
Pair = tuple[tuple[int, ...], tuple[int, ...]]


class Tokens(Protocol):
    """A tokenizer as tasks use it: text to a model's token ids and back."""

    @property
    def begin(self) -> int:
        """The token before a text without context: the beginning of a sequence, or its end in models without one."""

    @property
    def end(self) -> int:
        """The end-of-sequence token."""

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Token ids with the special tokens that the model expects around a text."""

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Token ids without special tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens, special tokens left out."""


class Text(Tokens, Protocol):
    """A model's tokenizer as batch jobs use it."""

    def problem(self) -> str:
        """How the tokenizer and the model disagree; empty if they agree."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids by the model's chat template, up to the start of the answer. Raises HarnessError if it fails."""

    def token(self, token: int) -> str:
        """One token's text as it reads among other tokens; the token's name if it is only part of a character."""

    def close(self) -> None:
        """Frees what `encode_chat` has started; all methods can still be called."""


@dataclass(frozen=True)
class Questions:
    """The questions of a task: prompts to complete, and continuations to score.

    `examples`: how many examples they are made from. `shortened`: how many prompts lost worked examples because they
    were too long; `truncated`: how many lost their beginning. `files`: SHA-256 of each file that was read, by name.
    """

    prompts: tuple[GenerationRequest, ...] = ()
    pairs: tuple[Pair, ...] = ()
    examples: int = 0
    shortened: int = 0
    truncated: int = 0
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Prompt tokens and new tokens of each question; a pair to score counts as prompt."""
        completions = [(len(r.prompt), r.sampling.max_tokens) for r in self.prompts]
        return completions + [(len(context) + len(continuation), 0) for context, continuation in self.pairs]

    @property
    def max_sequence(self) -> int:
        """Tokens of the longest sequence."""
        return max(map(sum, self.lengths))

    @property
    def mean_sequence(self) -> int:
        """Mean number of a sequence's cached tokens over its life."""
        return mean_cached_length(self.lengths)

    @property
    def mean_new(self) -> int:
        """Mean number of a sequence's new tokens."""
        return mean_generated(self.lengths)


@dataclass(frozen=True)
class Answers:
    """A model's answers: the completion of each prompt, and the score of each pair."""

    texts: Sequence[str] = ()
    scores: Sequence[Score] = ()


@dataclass(frozen=True)
class Judged:
    """A task's figures over answers: means, each with its `_stderr`, and others without.

    `outcomes`: per mean, its value for each example, in order; `weights`: the weight of each example, if they differ.
    The outcomes of figures named `*perplexity` are mean log-likelihoods in nats. `examples`: how many examples were
    judged, if that is not how many were asked. `version`: the versions of task and data in words, beyond `files`.
    """

    figures: Mapping[str, float]
    outcomes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    weights: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    examples: int | None = None
    version: str = ""


@dataclass(frozen=True)
class Circumstances:
    """The model that a task examines, and how: tokenizer, length of its `context` in tokens, number of examples (None:
    all), folder of data (None: the Hugging Face hub), and seed.

    `model` is the folder of the model's tokenizer, if there is one; `cache` is a folder that persists between runs.
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
    """Asks a model questions and judges its answers. `protocol`: what a reader must know to compare its figures."""

    @property
    def name(self) -> str: ...

    @property
    def protocol(self) -> str: ...

    def questions(self, given: Circumstances, report: Report) -> Questions:
        """The questions; equal circumstances give equal questions. Raises HarnessError for missing or broken data."""

    def judge(self, given: Circumstances, answers: Answers) -> Judged:
        """The figures of the answers to those questions."""
