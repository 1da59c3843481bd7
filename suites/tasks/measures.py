"""Figures over answers: means with standard errors, and F1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harness.api.task import Judged


def judged(values: Mapping[str, Sequence[float]], **others: float) -> Judged:
    """Means and standard errors of each metric's values by example, plus `others`, which are not means."""
    figures = {key: figure for name, outcomes in values.items() for key, figure in mean(name, outcomes).items()}
    return Judged(figures | others, {name: tuple(outcomes) for name, outcomes in values.items()})


def mean(name: str, values: Sequence[float]) -> dict[str, float]:
    """A mean and its standard error (sample standard deviation / sqrt(n)), keyed `name` and `name_stderr`."""
    middle = math.fsum(values) / len(values)
    spread = math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1) if len(values) > 1 else 0.0
    return {name: middle, f"{name}_stderr": math.sqrt(spread / len(values))}


def f1(positive: Sequence[bool], correct: Sequence[bool]) -> float:
    """F1 of the positive class; a wrong answer to a negative example counts as a false positive.

    Source: Narayan et al. 2022, whose code divides by at least 1 and so gives less where F1 is low.
    """
    true = sum(a and b for a, b in zip(positive, correct, strict=True))
    return 2 * true / (2 * true + len(correct) - sum(correct)) if true else 0.0
