"""Figures over many answers, with the standard errors of means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harness.api.task import Judged


def judged(values: Mapping[str, Sequence[float]], **others: float) -> Judged:
    """Means of what each example was worth, beside figures that are no means."""
    figures = {name: figure for name, each in values.items() for name, figure in mean(name, each).items()}
    return Judged(figures | others, {name: tuple(each) for name, each in values.items()})


def mean(name: str, values: Sequence[float]) -> dict[str, float]:
    """A mean and its standard error: the sample's variance over n."""
    middle = math.fsum(values) / len(values)
    spread = math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1) if len(values) > 1 else 0.0
    return {name: middle, f"{name}_stderr": math.sqrt(spread / len(values))}


def f1(wanted: Sequence[bool], right: Sequence[bool]) -> float:
    """Of yes, from where it is `wanted` and which answers are right: any wrong answer to a no counts as a yes.

    Source: Narayan et al. 2022, whose own code divides by at least 1 and so gives less where F1 is low.
    """
    true = sum(a and b for a, b in zip(wanted, right, strict=True))
    return 2 * true / (2 * true + len(right) - sum(right)) if true else 0.0
