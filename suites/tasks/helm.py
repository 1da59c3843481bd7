"""HELM scenarios as native tasks, with the prompts of HELM's in-context adapter and its metrics.

Source: crfm-helm 0.2.1 (Liang et al. 2022), as FlexGen ran it (Sheng et al. 2023, table 9): a few hundred instances of
the validation and test splits, drawn by numpy's generator with seed 0; each trial draws new worked examples.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.api import HarnessError
from harness.api.task import Judged
from suites.tasks.data import Data, from_hub
from suites.tasks.measures import by_name
from suites.tasks.prompts import Example, Material, PromptTask


@dataclass(frozen=True)
class Instance:
    """A question and its answer as the prompt shows them, and the label of the answer's class."""

    question: str
    answer: str
    label: str
    answers: tuple[str, ...] = ()

    @property
    def golds(self) -> tuple[str, ...]:
        """All accepted answers."""
        return self.answers or (self.answer,)


#: (Instances for worked examples, instances to evaluate).
Splits = tuple[Sequence[Instance], Sequence[Instance]]


@dataclass(frozen=True)
class Helm(PromptTask):
    """A scenario. `splits` makes its instances from files, or without them from the hub.

    `num_instances`: how many instances are evaluated; None for all, in order. `before_answer`: the text between a
    question and its answer.
    """

    splits: Callable[[Data | None], Splits]
    shots: int
    metrics: tuple[str, ...]
    instructions: str = ""
    num_instances: int | None = None
    trials: int = 3
    before_answer: str = " "
    note: str = ""

    @property
    def protocol(self) -> str:
        """HELM's version, shots, trials and instances."""
        return f"crfm-helm 0.2.1: {self.shots} shots, {self.trials} trials, validation and test together{self.note}"

    def material(self, folder: Path | None) -> Material:
        """The same questions in each trial, with other worked examples."""
        data = None if folder is None else Data(folder)
        examples = self._examples(*self.splits(data))
        return Material(examples, data.digests if data else {})

    def evaluate(self, examples: Sequence[Example], answers: Sequence[Sequence[str]]) -> Judged:
        """Means of HELM's metrics over questions; the trials of a question are averaged first."""
        keys = [example.key for example in examples]
        return by_name(self.metrics, [example.answers for example in examples], answers, keys)

    def _examples(self, train: Sequence[Instance], pool: Sequence[Instance]) -> list[Example]:
        instances = [pool[i] for i in _drawn(len(pool), self.num_instances)]
        examples = []
        for trial in range(self.trials):
            worked = [f"{w.question}{self.before_answer}{w.answer}\n\n" for w in sampled(train, self.shots, trial)]
            # shorter prompts drop worked examples from the last one on
            prefixes = ["".join(worked[:count]) for count in range(len(worked), -1, -1)]
            for key, instance in enumerate(instances):
                prompt, *shorter = (self.instructions + prefix + instance.question for prefix in prefixes)
                examples.append(Example(prompt, instance.golds, tuple(shorter), key))
        return examples


def sampled(train: Sequence[Instance], count: int, seed: int) -> list[Instance]:
    """Draws worked examples from each class in turn, the most frequent classes first.

    Source: InContextLearningAdapter.sample_examples.
    """
    rng = random.Random(seed)
    by_label: dict[str, list[Instance]] = {}
    for instance in train:
        by_label.setdefault(instance.label, []).append(instance)
    by_count: dict[int, list[str]] = {}
    for label, instances in sorted(by_label.items()):
        by_count.setdefault(len(instances), []).append(label)
    order: list[str] = []
    for size in sorted(by_count, reverse=True):
        rng.shuffle(by_count[size])
        order += by_count[size]
    drawn: list[Instance] = []
    for label in itertools.cycle(order):
        if len(drawn) == min(count, len(train)):
            break
        if instances := by_label[label]:
            drawn.append(instances.pop(rng.randrange(len(instances))))
    return drawn


def _drawn(population: int, count: int | None) -> list[int]:
    """Indices of the instances to evaluate: all in order if at most `count`, else as numpy's generator draws them."""
    if count is None or population <= count:
        return list(range(population))
    return [int(i) for i in np.random.RandomState(0).choice(population, count, replace=False)]


_LETTERS = "ABCD"
#: Articles to summarise, as many as in HELM's sample.
_SUMMARIES = 518
#: Words of an article in a prompt, and the word range of a worked example, as in HELM's SummarizationScenario.
_ARTICLE, _WORKED = 512, (50, 150)
#: Splits that the hub names differently.
_ON_HUB = {"val": "validation", "valid": "validation"}


def _choice(question: str, choices: Sequence[str], letter: str) -> Instance:
    options = "".join(f"\n{mark}. {text}" for mark, text in zip(_LETTERS, choices, strict=True))
    return Instance(f"Question: {question}{options}\nAnswer:", letter, choices[_LETTERS.index(letter)])


def _mmlu(subject: str) -> Helm:
    def split(data: Data | None, name: str) -> list[Instance]:
        if data is None:
            rows = from_hub("cais/mmlu", subject, _ON_HUB.get(name, name))
            return [_choice(row["question"], row["choices"], _LETTERS[row["answer"]]) for row in rows]
        file = f"mmlu/{subject}_{name}.csv"
        instances = []
        for question, *choices, letter in data.bare_rows(file, 6):
            if letter not in tuple(_LETTERS):
                raise HarnessError(f"{file}: the answer {letter!r} is not a letter from A to D")
            instances.append(_choice(question, choices, letter))
        return instances

    def splits(data: Data | None) -> Splits:
        return split(data, "dev"), [*split(data, "val"), *split(data, "test")]

    words = subject.replace("_", " ")
    return Helm(
        f"helm_mmlu_{subject}", 1, splits, 5, ("exact_match",), num_instances=100, stop=(),
        instructions=f"The following are multiple choice questions (with answers) about {words}.\n\n",
        note="; 100 questions, without augmentation",
    )  # fmt: skip


def _reasoning(
    kind: str, hub: tuple[str, str], shape: Callable[[str], str], shots: int, max_tokens: int, metrics: tuple[str, ...],
    before_answer: str = " ",
) -> Helm:  # fmt: skip
    def split(data: Data | None, name: str) -> list[Instance]:
        if data is None:
            pairs = [(row["input"], row["target"]) for row in from_hub(*hub, _ON_HUB.get(name, name))]
        else:
            lines = data.objects(f"helm_synthetic_reasoning_{kind}/{name}.jsonl", ("input", "output"))
            pairs = [(line["input"], line["output"]) for line in lines]
        return [Instance(shape(text), answer, answer) for text, answer in pairs]

    def splits(data: Data | None) -> Splits:
        return split(data, "train"), [*split(data, "valid"), *split(data, "test")]

    return Helm(
        f"helm_synthetic_reasoning_{kind}", max_tokens, splits, shots, metrics, num_instances=515,
        instructions="Please solve the following problem.\n\n", before_answer=before_answer,
    )  # fmt: skip


def _summaries(name: str) -> Helm:
    def shape(article: str, summary: str) -> Instance:
        words = " ".join(article.split()[:_ARTICLE])
        question = f"###\nArticle: {words}\n\nSummarize the above article in 1 sentence."
        return Instance(question, summary, summary)

    def splits(data: Data | None) -> Splits:
        if data is None:
            train, test = (
                [(row["document"], row["summary"]) for row in from_hub("EdinburghNLP/xsum", None, part)]
                for part in ("train[:2000]", "test")
            )
        else:
            lines = data.objects("xsum_sample/dev.jsonl", ("dialogue", "summary"))
            pairs = [(line["dialogue"], line["summary"]) for line in lines]
            train, test = pairs[_SUMMARIES:], pairs[:_SUMMARIES]
        worked = [pair for pair in train if _WORKED[0] <= len(pair[0].split()) <= _WORKED[1]]
        return [shape(*pair) for pair in worked], [shape(*pair) for pair in test]

    return Helm(name, 64, splits, 5, ("rouge_2",), num_instances=_SUMMARIES, stop=("###",), temperature=0.3,
                trials=1, before_answer="\n",
                note="; a substitute for HELM's sample of XSum, with worked examples from its rest")  # fmt: skip


def _wikifact(subject: str) -> Helm:
    name = f"helm_wikifact_{subject}"

    def split(part: str) -> list[Instance]:
        instances = []
        for row in from_hub("lighteval/wikifact", subject, part):
            golds = tuple(map(str, row["references"]))
            instances.append(Instance(row["question"], golds[0], golds[0], golds))
        return instances

    def splits(data: Data | None) -> Splits:
        if data is not None:
            raise HarnessError(f"task {name}: it reads no files; leave out --data-dir to use the hub")
        return split("train"), split("test")

    return Helm(name, 8, splits, 5, ("quasi_exact_match", "quasi_exact_match@5"), temperature=1.0, outputs=5)


_MATCHES = ("exact_match", "quasi_exact_match", "prefix_exact_match", "quasi_prefix_exact_match")
_SETS = ("f1_set_match", "exact_set_match", "iou_set_match", "f1_score")

TASKS = (
    _wikifact("plaintiff"),
    _wikifact("instance_of"),
    _mmlu("abstract_algebra"),
    _mmlu("us_foreign_policy"),
    _reasoning("pattern_match", ("lighteval/synthetic_reasoning", "pattern_match"), lambda text: f"{text}\nTarget:",
               shots=5, max_tokens=50, metrics=_MATCHES),
    _reasoning("natural_easy", ("lighteval/synthetic_reasoning_natural", "easy"), lambda text: f"Rules:\n{text}\n",
               shots=3, max_tokens=20, before_answer="", metrics=_SETS),
    _summaries("helm_summarization_xsum"),
)  # fmt: skip
