"""The statistics of comparisons and of pairs: against scipy, by hand, and as properties that hold for any samples."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.stats import (
    detectable,
    holm,
    interval_of,
    launches_needed,
    mann_whitney,
    mcnemar,
    noise_floor,
    paired,
    quotient_of_medians,
    ratio_of,
    ratio_of_runs,
    smallest_p,
)
from tests import simulate_coverage
from tests.simulate_noise import KINDS

scipy_stats = pytest.importorskip("scipy.stats")

SPEEDS = st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=9)
#: Few values, so that ties are common.
TIED = st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0]), min_size=1, max_size=6)

BASE = (10.1, 9.8, 10.4, 9.9, 10.0, 10.2, 9.7)
SLOWER = (9.1, 8.9, 9.3, 9.0, 9.15, 8.7, 9.25)


@pytest.mark.parametrize(
    ("base", "head"),
    [
        (BASE, SLOWER),
        (BASE, (10.05, 9.75, 10.35, 9.95, 10.3, 9.65, 10.15)),
        ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)),
        ((1.0, 5.0), (2.0, 3.0, 4.0, 6.0, 7.0)),
        ((1.0,), (2.0,)),
        (tuple(range(1, 21)), tuple(x + 0.5 for x in range(4, 27))),
        ((1.0, 2.0, 2.0), (2.0, 3.0, 3.0)),
        ((5.0, 5.0, 6.0, 7.0), (5.0, 8.0, 8.0, 8.0, 9.0)),
    ],
)
def test_mann_whitney_is_scipys_exact_one_with_ties_too(base, head):
    tied = len({*base, *head}) < len(base) + len(head)
    every = scipy_stats.PermutationMethod(n_resamples=10_000)  # more than there are: all of them
    method = every if tied else "exact"
    expected = scipy_stats.mannwhitneyu(base, head, alternative="two-sided", method=method).pvalue
    assert mann_whitney(base, head) == pytest.approx(expected, rel=1e-12)


def test_large_samples_are_normal():
    base, head = [1.0 + i / 97 for i in range(40)], [1.1 + i / 89 for i in range(40)]
    expected = scipy_stats.mannwhitneyu(base, head, alternative="two-sided", method="asymptotic").pvalue
    assert mann_whitney(base, head) == pytest.approx(expected)


@given(TIED, TIED)
def test_mann_whitney_by_counting_every_choice(base, head):
    values = [*base, *head]

    def statistic(chosen):
        return sum((values[i] > values[j]) + 0.5 * (values[i] == values[j])
                   for i in chosen for j in range(len(values)) if j not in chosen)  # fmt: skip

    own = statistic(set(range(len(base))))
    found = [statistic(set(c)) for c in itertools.combinations(range(len(values)), len(base))]
    tail = min(sum(s <= own for s in found), sum(s >= own for s in found))
    assert mann_whitney(base, head) == pytest.approx(min(1.0, 2 * tail / len(found)))


@given(st.integers(1, 8), st.integers(1, 8))
def test_the_smallest_p_is_that_of_samples_that_do_not_overlap(n, m):
    apart = mann_whitney(list(range(1, n + 1)), list(range(100, 100 + m)))
    assert apart == pytest.approx(smallest_p(n, m))


def test_three_launches_can_never_tell():
    assert smallest_p(3, 3) == pytest.approx(0.1)
    assert launches_needed(1, alpha=0.05) == 4
    assert [launches_needed(cells) for cells in (1, 2, 3, 9, 10, 34, 35)] == [5, 5, 6, 6, 7, 7, 8]


@given(SPEEDS, SPEEDS)
def test_a_ratio_is_the_quotient_of_the_medians_that_tables_show_and_turns_around(base, head):
    expected = statistics.median(head) / statistics.median(base)
    found, turned = ratio_of(base, head), ratio_of(head, base)
    assert found.ratio == quotient_of_medians(base, head) == expected
    assert turned.ratio == pytest.approx(1 / expected)
    assert (found.low is None) == (min(len(base), len(head)) < 3)
    if found.low is not None:
        assert found.low <= found.ratio <= found.high
        assert (turned.low, turned.high) == pytest.approx((1 / found.high, 1 / found.low))


def test_an_interval_reaches_to_the_quotient_of_sides_that_scatter_in_different_ways():
    """Half of the launches are twice as fast. The test does not reject 1.5 only, but the medians differ threefold."""
    base, head = [1.0] * 9 + [2.0] * 8, [1.5] * 8 + [3.0] * 9
    assert quotient_of_medians(base, head) == 3.0
    found = ratio_of(base, head)
    assert (found.low, found.ratio, found.high) == (pytest.approx(1.5), 3.0, 3.0)
    turned = ratio_of(head, base)
    assert (turned.low, turned.ratio, turned.high) == (1 / 3, 1 / 3, pytest.approx(1 / 1.5))


#: Without ties, in which the test rejects a little more than the interval excludes.
SIDE = st.lists(st.integers(500, 2000).map(lambda i: i / 1000), min_size=4, max_size=9, unique=True)


@given(SIDE, SIDE)
def test_the_interval_is_what_mann_whitney_does_not_reject(base, head):
    found = ratio_of(base, head)
    quotients = sorted(b / a for a in base for b in head)
    assert quotients[0] * (1 - 1e-9) <= found.low <= found.ratio * (1 + 1e-9)
    assert found.ratio * (1 - 1e-9) <= found.high <= quotients[-1] * (1 + 1e-9)
    for end, outwards in ((found.low, 1 - 1e-6), (found.high, 1 + 1e-6)):
        assert mann_whitney([a * end * outwards for a in base], head) < 0.05
    between = [(x + y) / 2 for x, y in itertools.pairwise([found.low, *quotients, found.high]) if y - x > 1e-6]
    for ratio in (r for r in between if found.low < r < found.high):
        assert mann_whitney([a * ratio for a in base], head) > 0.05


def test_the_interval_by_hand():
    """Of seven launches a side the ninth smallest and largest of 49 quotients: U is at most 8 with p = 0.038."""
    quotients = sorted(b / a for a in BASE for b in SLOWER)
    found = ratio_of(BASE, SLOWER)
    assert (found.low, found.high) == pytest.approx((quotients[8], quotients[-9]))
    assert found.excludes_one
    many = [1.0 + i / 97 for i in range(30)]
    assert ratio_of(many, many).low == pytest.approx(1 / ratio_of(many, many).high)


@pytest.mark.parametrize("head", [(2.0, 2.1, 2.5), (1.0, 1.2, 1.3, 1.4)])
def test_three_launches_have_welchs_interval(head):
    """Ranks cannot exclude any ratio at 5 % there."""
    base = (1.0, 1.1, 1.3)
    logs = [[math.log(v) for v in side] for side in (head, base)]
    expected = scipy_stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
    found = ratio_of(base, head)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((expected.low, expected.high))
    assert ratio_of([2.0] * 3, [1.0] * 3).high == 0.5


def test_below_three_launches_there_is_no_interval():
    assert ratio_of([1.0, 1.1], [2.0, 3.0, 2.5]).low is None and not ratio_of([1.0], [2.0, 3.0]).excludes_one
    assert interval_of([1.0, 1.2]) is None


@given(st.integers(6, 40))
def test_a_medians_interval_is_by_binomial_ranks(n):
    low, high = interval_of([float(i + 1) for i in range(n)])
    assert high == n + 1 - low
    assert 2 * scipy_stats.binom.cdf(low - 1, n, 0.5) <= 0.05 < 2 * scipy_stats.binom.cdf(low, n, 0.5)


def test_a_median_of_few_launches_has_students_interval():
    logs = [math.log(v) for v in SLOWER[:5]]
    expected = scipy_stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    assert interval_of(SLOWER[:5]) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))


def test_a_run_among_runs_is_students_further_observation():
    """Against scipy's test of one observation with many, whose pooled variance is theirs."""
    bases = [(10.0, 10.2, 10.1), (10.6, 10.4, 10.5), (9.8, 9.9, 9.7), (10.2, 10.3, 10.4)]
    head = (9.0, 9.1, 9.4)
    found, p = ratio_of_runs(bases, head)
    middle, fastest = (scipy_stats.ttest_ind([math.log(figure(head))], [math.log(figure(base)) for base in bases])
                     for figure in (statistics.median, max))  # fmt: skip
    interval = middle.confidence_interval(0.95)
    assert p == pytest.approx(fastest.pvalue) and fastest.pvalue > middle.pvalue
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((interval.low, interval.high))
    assert ratio_of_runs(bases, (9.1,))[1] > p, "a head of fewer launches is noisier"
    with pytest.raises(ValueError, match="two"):
        ratio_of_runs(bases[:1], (9.0,))


#: Within four standard errors of so many intervals.
TRIALS, LEAST = 2000, 0.95 - 4 * math.sqrt(0.95 * 0.05 / 2000)


@pytest.mark.parametrize("launches", simulate_coverage.LAUNCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_intervals_of_sides_in_turns_cover_as_they_say(kind, launches):
    assert simulate_coverage.ratio_coverage(kind, launches, TRIALS) >= LEAST


@pytest.mark.parametrize("launches", simulate_coverage.LAUNCHES)
def test_intervals_cover_where_one_side_has_heavy_tails(launches):
    assert simulate_coverage.uneven_coverage("heavy tails", launches, TRIALS) >= LEAST


@pytest.mark.parametrize("launches", simulate_coverage.LAUNCHES)
@pytest.mark.parametrize("kind", ["normal", "heavy tails"])
def test_intervals_of_independent_launches_cover_as_they_say(kind, launches):
    assert simulate_coverage.median_coverage(kind, launches, TRIALS) >= LEAST


@pytest.mark.parametrize("bad", [[], [0.0], [-1.0], [math.nan], [math.inf]])
def test_speeds_must_be_positive_numbers(bad):
    with pytest.raises(ValueError, match="positive"):
        quotient_of_medians(bad, [1.0])


def test_holm_by_hand():
    # 3 x 0.01, then 2 x 0.02, then 1 x 0.03 but not less than what came before
    assert holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([]) == []


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20))
def test_holm_lies_between_the_plain_p_and_bonferronis(p_values):
    adjusted = holm(p_values)
    for p, q in zip(p_values, adjusted, strict=True):
        assert p <= q <= min(1.0, len(p_values) * p) + 1e-12
    assert [q for _, q in sorted(zip(p_values, adjusted, strict=True))] == sorted(adjusted)


def test_the_noise_floor_is_the_median_over_splits():
    sample = (10.0, 10.5, 11.0, 12.0)
    apart = []
    for half in itertools.combinations(range(4), 2):
        logs = [[math.log(sample[i]) for i in part] for part in (half, set(range(4)) - set(half))]
        apart.append(abs(statistics.median(logs[0]) - statistics.median(logs[1])))
    assert noise_floor(sample) == pytest.approx(math.expm1(statistics.median(apart)))
    assert noise_floor(sample, (5.0, 5.0, 5.0, 5.0)) == noise_floor(sample)
    assert noise_floor((1.0, 2.0, 3.0)) is None
    assert noise_floor([1.0] * 30) == 0.0


@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemar_is_the_binomial_test(better, worse):
    pairs = better + worse
    tail = sum(math.comb(pairs, i) for i in range(min(better, worse) + 1)) / 2**pairs
    assert mcnemar(better, worse) == pytest.approx(min(1.0, 2 * tail), rel=1e-9)


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


def test_pairs_are_weighted():
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


def test_a_detectable_effect_is_found_in_four_of_five_samples():
    rng = random.Random(2)
    effect = detectable([rng.gauss(0, 1) for _ in range(400)])
    seen = sum(paired([0.5] * 400, [0.5 + rng.gauss(effect, 1) for _ in range(400)]).significant for _ in range(200))
    assert 0.7 < seen / 200 < 0.9


def test_no_pairs_and_samples_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="nothing"):
        paired([], [])
    with pytest.raises(ValueError, match="zip"):
        paired([1.0], [1.0, 0.0])
