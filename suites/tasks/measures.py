"""Figures over answers: means with standard errors, F1, and HELM's metrics of an answer against the gold text.

Source of HELM's metrics, each a number from 0 to 1: crfm-helm 0.2.1, benchmark/metrics/basic_metrics.py.
"""

import functools
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, variance
from typing import Any

from harness.api import HarnessError
from harness.api.task import Judged
from harness.common.packages import install_extra

Metric = Callable[[str, str], float]
_NOTHING = "Nothing."
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def judged(values: Mapping[str, Sequence[float]], **others: float) -> Judged:
    """Means and standard errors of each metric's values by example, plus `others`, which are not means."""
    figures = {key: figure for name, outcomes in values.items() for key, figure in mean(name, outcomes).items()}
    return Judged(figures | others, {name: tuple(outcomes) for name, outcomes in values.items()})


def mean(name: str, values: Sequence[float]) -> dict[str, float]:
    """A mean and its standard error (sample standard deviation / sqrt(n)), keyed `name` and `name_stderr`."""
    spread = variance(values) if len(values) > 1 else 0.0
    return {name: fmean(values), f"{name}_stderr": math.sqrt(spread / len(values))}


def f1(positive: Sequence[bool], correct: Sequence[bool]) -> float:
    """F1 of the positive class; a wrong answer to a negative example counts as a false positive.

    Source: Narayan et al. 2022, whose code divides by at least 1 and so gives less where F1 is low.
    """
    true = sum(a and b for a, b in zip(positive, correct, strict=True))
    return 2 * true / (2 * true + len(correct) - sum(correct)) if true else 0.0


def by_name(
    names: Sequence[str], golds: Sequence[Sequence[str]], answers: Sequence[Sequence[str]], keys: Sequence[int]
) -> Judged:
    """Means of metrics, with standard errors over questions, which `keys` identify.

    `golds` and `answers` hold the accepted texts and the answers of each example. A metric `name@k` takes the best of k
    answers, a plain one the first answer.
    """
    pairs = [(texts, [a.strip() for a in given]) for texts, given in zip(golds, answers, strict=True)]
    figures = judged({name: _mean_by_key(keys, [_best(name, *pair) for pair in pairs]) for name in names})
    return replace(figures, examples=len(set(keys)))


def _mean_by_key(keys: Sequence[int], values: Sequence[float]) -> list[float]:
    """The mean of each key's values."""
    by_key: dict[int, list[float]] = {}
    for key, value in zip(keys, values, strict=True):
        by_key.setdefault(key, []).append(value)
    return [fmean(key_values) for key_values in by_key.values()]


def _best(name: str, golds: Sequence[str], answers: Sequence[str]) -> float:
    metric, _, count = name.partition("@")
    return max(METRICS[metric](gold, answer) for gold in golds for answer in answers[: int(count or 1)])


def normalized(text: str) -> str:
    """`text` in lower case, without punctuation and articles, with single spaces."""
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
    """F1 of the sets of words."""
    return _f1(set(normalized(gold).split()), set(normalized(answer).split()))


def exact_set_match(gold: str, answer: str) -> float:
    return float(_set(gold) == _set(_line(answer)))


def iou_set_match(gold: str, answer: str) -> float:
    """Intersection over union of the named sets; for the gold text "Nothing." only that answer counts."""
    if gold == _NOTHING:
        return float(_line(answer) == _NOTHING)
    return len(_set(gold) & _set(_line(answer))) / len(_set(gold) | _set(_line(answer)))


def f1_set_match(gold: str, answer: str) -> float:
    if gold == _NOTHING:
        return float(_line(answer) == _NOTHING)
    return _f1(_set(gold), _set(_line(answer)))


def rouge_2(gold: str, answer: str) -> float:
    """ROUGE-2: F1 of stemmed bigrams. Raises HarnessError where rouge-score is not installed."""
    return float(_rouge().score(gold, answer)["rouge2"].fmeasure)


@functools.cache
def _rouge() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError:
        raise HarnessError(f"ROUGE needs rouge-score: {install_extra('eval')}") from None
    return RougeScorer(["rouge2"], use_stemmer=True)


METRICS: Mapping[str, Metric] = {
    metric.__name__: metric
    for metric in (exact_match, quasi_exact_match, prefix_exact_match, quasi_prefix_exact_match, f1_score,
                   exact_set_match, iou_set_match, f1_set_match, rouge_2)
}  # fmt: skip


def _line(text: str) -> str:
    return text.split("\n", maxsplit=1)[0]


def _set(text: str) -> set[str]:
    """The set {a, b} of a sentence such as `X is a and b.`"""
    if text == _NOTHING:
        return set()
    return set(text.replace(".", "").split(" is ")[-1].split(" and "))


def _f1(gold: set[str], answer: set[str]) -> float:
    total = len(gold) + len(answer)
    return 2 * len(gold & answer) / total if total else 0.0
