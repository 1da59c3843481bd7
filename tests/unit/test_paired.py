"""Comparisons in pairs: against tables, against by-hand figures, and that they find what is there."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from reports.stats import detectable, mcnemar, paired


@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemar_is_the_binomial_test(better, worse):
    expected = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert mcnemar(better, worse) == pytest.approx(expected, rel=1e-9)


def test_a_difference_is_new_less_old_with_its_interval():
    old, new = [1.0] * 60 + [0.0] * 40, [1.0] * 50 + [0.0] * 50
    found = paired(old, new)
    assert found.difference == pytest.approx(-0.1)
    assert found.p == pytest.approx(mcnemar(0, 10))
    assert found.significant
    assert -0.18 < found.low < found.difference < found.high < -0.02


def test_equal_answers_differ_by_nothing():
    found = paired([1.0, 0.0, 1.0], [1.0, 0.0, 1.0])
    assert (found.difference, found.low, found.high, found.p) == (0, 0, 0, 1)
    assert not found.significant
    assert paired([0.5, 0.7], [0.5, 0.7]).detectable == 0


def test_a_loss_that_mcnemars_test_could_not_see_is_not_said_to_be_seen():
    """Six answers that turned wrong are the fewest that it sees; eight must be expected for that to be likely."""
    assert mcnemar(0, 5) > 0.05 > mcnemar(0, 6)
    found = paired([1.0] * 100, [1.0] * 99 + [0.0])
    assert found.detectable == pytest.approx(0.079)
    rng = random.Random(4)
    flips = [sum(rng.random() < found.detectable for _ in range(100)) for _ in range(2000)]
    assert sum(mcnemar(0, n) < 0.05 for n in flips) / 2000 == pytest.approx(0.8, abs=0.05)
    assert paired([1.0] * 4, [1.0] * 4).detectable == 1.0


@pytest.mark.parametrize("shift", [0.0, 0.2])
def test_the_bootstrap_of_plain_values_is_as_wide_as_theory_says(shift):
    rng = random.Random(1)
    old = [rng.gauss(0, 3) for _ in range(2000)]
    new = [value + rng.gauss(shift, 1) for value in old]
    found = paired(old, new)
    assert found.p is None
    assert (found.high - found.low) / 2 == pytest.approx(1.96 / 2000**0.5, rel=0.1)
    assert found.significant is (shift > 0)


def test_what_counts_for_more_weighs_more():
    """Of a quotient of sums: against drawing whole examples, with their weights, again and again."""
    rng = random.Random(3)
    weights = [rng.choice([10.0, 100.0, 500.0]) for _ in range(300)]
    old = [rng.gauss(0, 1) for _ in weights]
    new = [value + rng.gauss(0.1 if weight > 50 else -1.0, 0.5) for value, weight in zip(old, weights, strict=True)]
    found = paired(old, new, weights)
    sums = list(zip([w * (b - a) for a, b, w in zip(old, new, weights, strict=True)], weights, strict=True))
    assert found.difference == pytest.approx(sum(d for d, _ in sums) / sum(weights))
    drawn = sorted(sum(d for d, _ in some) / sum(w for _, w in some)
                   for some in (rng.choices(sums, k=len(sums)) for _ in range(2000)))  # fmt: skip
    assert found.low == pytest.approx(drawn[50], abs=0.01)
    assert found.high == pytest.approx(drawn[1949], abs=0.01)
    assert paired(old, new, [2.0] * 300).difference == pytest.approx(paired(old, new).difference)


def test_what_would_have_been_seen_is_seen_four_times_of_five():
    rng = random.Random(2)
    effect = detectable([rng.gauss(0, 1) for _ in range(400)])
    seen = sum(paired([0.5] * 400, [0.5 + rng.gauss(effect, 1) for _ in range(400)]).significant for _ in range(200))
    assert 0.7 < seen / 200 < 0.9


def test_there_must_be_pairs():
    with pytest.raises(ValueError, match="nothing"):
        paired([], [])
    with pytest.raises(ValueError, match="zip"):
        paired([1.0], [1.0, 0.0])
