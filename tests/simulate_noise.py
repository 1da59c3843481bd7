"""The noise of launches: what simulations draw, and what committed records have.

`python -m tests.simulate_noise` prints the variation of docs/results and of simulated launches (seconds).
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, quantiles, stdev
from typing import Literal

import numpy as np

from reports.records import read_runs
from reports.samples import THROUGHPUT, samples_of

Kind = Literal["normal", "heavy tails", "drift", "slow stretches", "all three"]
KINDS: Sequence[Kind] = ("normal", "heavy tails", "drift", "slow stretches", "all three")
#: Heavy tails are Student's t of so many degrees of freedom.
_FREEDOM = 4
#: Drift has half of the variance, and so much of it stays from one launch to the next.
_STAYS = 0.9
#: A slow stretch begins with this probability a launch, ends with this one, and takes this share of the speed.
_BEGINS, _ENDS, _SLOWER = 0.05, 1 / 3, 0.3
RESULTS = Path(__file__).parents[1] / "docs" / "results"


def noise(kind: Kind, variation: float, trials: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Deviations of log speed, (trials, count), in the order of launches; stretches come on top of `variation`."""
    heavy, drifts = kind in ("heavy tails", "all three"), kind in ("drift", "all three")

    def shocks() -> np.ndarray:
        if heavy:
            return rng.standard_t(_FREEDOM, (trials, count)) / math.sqrt(_FREEDOM / (_FREEDOM - 2))
        return rng.normal(size=(trials, count))

    values = shocks()
    if drifts:
        level, steps = rng.normal(size=trials), shocks()
        for i in range(count):
            level = _STAYS * level + math.sqrt(1 - _STAYS**2) * steps[:, i]
            values[:, i] = (values[:, i] + level) / math.sqrt(2)
    values *= variation
    if kind in ("slow stretches", "all three"):
        slow = rng.random(trials) < _BEGINS / (_BEGINS + _ENDS)
        for i in range(count):
            values[:, i] += slow * math.log(1 - _SLOWER)
            slow = np.where(slow, rng.random(trials) >= _ENDS, rng.random(trials) < _BEGINS)
    return values


def variations(folder: Path = RESULTS) -> list[float]:
    """Coefficients of variation of the throughput of each measured cell with three launches or more, sorted."""
    samples = [s for run in sorted(folder.glob("*/records.jsonl"))
               for s in samples_of(read_runs([run.parent]).records, THROUGHPUT).values()]  # fmt: skip
    return sorted(stdev(s.speeds) / mean(s.speeds) for s in samples if len(s.speeds) >= 3 and not s.virtual)


def main() -> None:
    """Prints the distribution."""
    found = variations()
    deciles = quantiles(found, n=10, method="inclusive")
    sys.stdout.write(f"{len(found)} cells: median {median(found):.1%}, one in ten above {deciles[-1]:.1%}, "
                     f"largest {found[-1]:.1%}\n")  # fmt: skip
    for variation in (0.02, 0.05, 0.10, 0.16):
        speeds = np.exp(noise("all three", variation, 20_000, 1, np.random.default_rng(0)))
        sys.stdout.write(f"simulated, {variation:.0%}: {speeds.std() / speeds.mean():.0%} with slow stretches\n")


if __name__ == "__main__":
    main()
