"""How often the intervals of reports and `compare` hold the truth.

`python -m tests.simulate_coverage` prints the table of docs/guides/regressions.md (a minute).
"""

import sys

import numpy as np

from reports.stats import interval_of, ratio_of
from tests.simulate_compare import turns
from tests.simulate_noise import KINDS, Kind, noise

LAUNCHES = (3, 5, 7, 10, 15)
#: Noise that launches do not share, or hardly.
INDEPENDENT: tuple[Kind, ...] = ("normal", "heavy tails", "slow stretches")
_VARIATION = 0.05


def ratio_coverage(kind: Kind, launches: int, trials: int, seed: int = 0) -> float:
    """The share of intervals of the ratio of two equal sides, in turns as by ci/interleave.sh, that hold 1."""
    speeds = np.exp(noise(kind, _VARIATION, trials, 2 * launches, np.random.default_rng(seed)))
    sides = np.array(turns(launches))
    return float(
        np.mean([not ratio_of(row[sides == 0].tolist(), row[sides == 1].tolist()).excludes_one for row in speeds])
    )


def uneven_coverage(kind: Kind, launches: int, trials: int, seed: int = 0) -> float:
    """The share of intervals of a ratio that hold the quotient of the long run's medians, where only launches of the
    head have this noise and those of the base are normal."""
    rng = np.random.default_rng(seed)
    truth = float(np.exp(np.median(noise(kind, _VARIATION, 200_000, 1, rng))))
    sides = [np.exp(noise(k, _VARIATION, trials, launches, rng)).tolist() for k in ("normal", kind)]
    ratios = (ratio_of(base, head) for base, head in zip(*sides, strict=True))
    return float(np.mean([r.low is not None and r.high is not None and r.low <= truth <= r.high for r in ratios]))


def median_coverage(kind: Kind, launches: int, trials: int, seed: int = 0) -> float:
    """The share of intervals of a cell's median, of launches after each other, that hold the long run's median."""
    rng = np.random.default_rng(seed)
    truth = float(np.exp(np.median(noise(kind, _VARIATION, 200_000, 1, rng))))
    intervals = [interval_of(list(row)) for row in np.exp(noise(kind, _VARIATION, trials, launches, rng))]
    return float(np.mean([i is not None and i[0] <= truth <= i[1] for i in intervals]))


def main(trials: int = 10_000) -> None:
    """Prints the table."""
    say = sys.stdout.write
    say(f"| interval of | noise | {' | '.join(f'{n} launches' for n in LAUNCHES)} |\n")
    say("| --- | --- |" + " ---: |" * len(LAUNCHES) + "\n")
    for name, coverage, kinds in (
        ("a ratio, sides in turns", ratio_coverage, KINDS),
        ("a ratio, noise of one side", uneven_coverage, INDEPENDENT[1:]),
        ("a cell's median", median_coverage, KINDS),
    ):
        for kind in kinds:
            say(f"| {name} | {kind} | {' | '.join(f'{coverage(kind, n, trials):.1%}' for n in LAUNCHES)} |\n")


if __name__ == "__main__":
    main()
