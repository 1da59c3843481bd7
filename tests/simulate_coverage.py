"""How often the intervals of reports and `compare` hold the truth.

`python -m tests.simulate_coverage` prints the table of docs/guides/regressions.md (a minute).
"""

import sys

import numpy as np

from reports.stats import interval_of, ratio_of
from tests.simulate_compare import turns
from tests.simulate_noise import KINDS, Kind, noise

LAUNCHES = (3, 5, 7, 10, 15)
_VARIATION = 0.05


def ratio_coverage(kind: Kind, launches: int, trials: int, seed: int = 0) -> float:
    """The share of intervals of the ratio of two equal sides, in turns as by ci/interleave.sh, that hold 1."""
    speeds = np.exp(noise(kind, _VARIATION, trials, 2 * launches, np.random.default_rng(seed)))
    sides = np.array(turns(launches))
    return float(np.mean([not ratio_of(row[sides == 0], row[sides == 1]).excludes_one for row in speeds]))


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
    for name, coverage in (("a ratio, sides in turns", ratio_coverage), ("a cell's median", median_coverage)):
        for kind in KINDS:
            say(f"| {name} | {kind} | {' | '.join(f'{coverage(kind, n, trials):.1%}' for n in LAUNCHES)} |\n")


if __name__ == "__main__":
    main()
