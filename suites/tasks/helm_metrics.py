"""HELM's metrics of a text against the right one: each a number from 0 to 1.

Source: crfm-helm 0.2.1, benchmark/metrics/basic_metrics.py.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from harness.api import HarnessError
from harness.api.task import Judged
from suites.tasks.measures import judged

Metric = Callable[[str, str], float]
_NOTHING = "Nothing."
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def by_name(
    names: Sequence[str], right: Sequence[Sequence[str]], given: Sequence[Sequence[str]], keys: Sequence[int]
) -> Judged:
    """Means of metrics of answers against the right texts, with standard errors over questions by their `keys`.

    A metric `name@k` is the best of k answers to a question, a plain one the first answer's.
    """
    pairs = [(golds, [text.strip() for text in texts]) for golds, texts in zip(right, given, strict=True)]
    found = judged({name: _by_key(keys, [_best(name, *pair) for pair in pairs]) for name in names})
    return replace(found, examples=len(set(keys)))


def _by_key(keys: Sequence[int], values: Sequence[float]) -> list[float]:
    """The mean of each key's values."""
    found: dict[int, list[float]] = {}
    for key, value in zip(keys, values, strict=True):
        found.setdefault(key, []).append(value)
    return [fmean(some) for some in found.values()]


def _best(name: str, golds: Sequence[str], answers: Sequence[str]) -> float:
    metric, _, count = name.partition("@")
    return max(METRICS[metric](gold, answer) for gold in golds for answer in answers[: int(count or 1)])


def normalized(text: str) -> str:
    """In lower case, without punctuation and articles, with single spaces."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(gold: str, answer: str) -> float:
    return float(gold.strip() == answer.strip())


def quasi_exact_match(gold: str, answer: str) -> float:
    return float(bool(answer) and normalized(gold) == normalized(answer))


def prefix_exact_match(gold: str, answer: str) -> float:
    return float(bool(answer) and answer.strip().startswith(gold.strip()))


def quasi_prefix_exact_match(gold: str, answer: str) -> float:
    return float(bool(answer) and normalized(answer).startswith(normalized(gold)))


def f1_score(gold: str, answer: str) -> float:
    """Of the sets of words."""
    return _f1(set(normalized(gold).split()), set(normalized(answer).split()))


def exact_set_match(gold: str, answer: str) -> float:
    return float(_set(gold) == _set(_line(answer)))


def iou_set_match(gold: str, answer: str) -> float:
    """What both name over what either names; of nothing only nothing is right."""
    if gold == _NOTHING:
        return float(_line(answer) == _NOTHING)
    return len(_set(gold) & _set(_line(answer))) / len(_set(gold) | _set(_line(answer)))


def f1_set_match(gold: str, answer: str) -> float:
    if gold == _NOTHING:
        return float(_line(answer) == _NOTHING)
    return _f1(_set(gold), _set(_line(answer)))


def rouge_2(gold: str, answer: str) -> float:
    """F1 of pairs of neighbouring words, of their stems. Raises HarnessError where rouge-score is not installed."""
    return float(_rouge().score(gold, answer)["rouge2"].fmeasure)


@functools.cache
def _rouge() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError:
        raise HarnessError("ROUGE needs rouge-score: pip install 'offload-harness[eval]' -c constraints.txt") from None
    return RougeScorer(["rouge2"], use_stemmer=True)


METRICS: Mapping[str, Metric] = {
    metric.__name__: metric
    for metric in (exact_match, quasi_exact_match, prefix_exact_match, quasi_prefix_exact_match, f1_score,
                   exact_set_match, iou_set_match, f1_set_match, rouge_2)
}  # fmt: skip


def _line(text: str) -> str:
    return text.split("\n", maxsplit=1)[0]


def _set(text: str) -> set[str]:
    """What a sentence such as `X is a and b.` says of its subject."""
    if text == _NOTHING:
        return set()
    return set(text.replace(".", "").split(" is ")[-1].split(" and "))


def _f1(wanted: set[str], given: set[str]) -> float:
    said = len(wanted) + len(given)
    return 2 * len(wanted & given) / said if said else 0.0
