"""Simulated comparisons: how often `compare` cries wolf, and how often it sees a wolf.

`python -m tests.simulate_compare` prints the table of docs/guides/regressions.md (minutes).

The noise is what shared machines do: heavy tails (Student's t with four degrees of freedom), half of the variance in a
drift that launches share with those just before them (an autoregression of 0.9 a launch), a coefficient of variation of
3 % in all. Launches come in the order in which `interleave.sh` makes them: round by round, a round one side after the
other, the side that is first in turn.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.api import ModelSpec, RunRecord, RunSpec, WorkloadSpec
from reports.compare import Rules, compare_records
from reports.records import Runs
from reports.verdicts import Comparison

VARIATION = 0.03
_DRIFT, _FREEDOM = 0.9, 4
#: Of the table: cells, launches on each side, whether these are interleaved.
_ROWS = ((1, 7, True), (5, 7, True), (10, 7, True), (30, 7, True), (5, 5, True), (5, 10, True), (1, 3, True),
         (5, 7, False))  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A suite of `cells` cells, `launches` on each side; the first cell of the head is `slowdown` slower."""

    cells: int
    launches: int
    slowdown: float = 0.0
    interleaved: bool = True


def noise(count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` deviations of log speed, in the order of launches."""
    scale = math.sqrt(_FREEDOM / (_FREEDOM - 2))
    shocks = rng.standard_t(_FREEDOM, size=(2, count)) / scale * VARIATION / math.sqrt(2)
    drift = np.empty(count)
    level = rng.normal() * VARIATION / math.sqrt(2)
    for i in range(count):
        level = _DRIFT * level + math.sqrt(1 - _DRIFT**2) * shocks[0, i]
        drift[i] = level
    return drift + shocks[1]


def pair(case: Case, rng: np.random.Generator) -> Comparison:
    """One simulated comparison."""
    order = [(r, side) for r in range(case.launches) for side in ((0, 1) if r % 2 == 0 else (1, 0))]
    if not case.interleaved:
        order.sort(key=lambda launch: launch[1])
    deviations = iter(noise(len(order) * case.cells, rng))
    sides: tuple[list[RunRecord], list[RunRecord]] = ([], [])
    for repeat, side in order:
        for cell in range(case.cells):
            speed = 10.0 * math.exp(next(deviations))
            if side == 1 and cell == 0:
                speed *= 1 - case.slowdown
            sides[side].append(_record(cell, repeat, speed))
    return compare_records(Runs(tuple(sides[0])), Runs(tuple(sides[1])), Rules())


def rate(case: Case, pairs: int, hit: Callable[[Comparison], bool], seed: int = 0) -> float:
    """The share of simulated comparisons that `hit` says yes to."""
    rng = np.random.default_rng(seed)
    return sum(hit(pair(case, rng)) for _ in range(pairs)) / pairs


def alarm(found: Comparison) -> bool:
    """Whether any cell is called a regression."""
    return bool(found.of("regression"))


def seen(found: Comparison) -> bool:
    """Whether the cell that was made slower is called a regression."""
    return found.cells[0].verdict == "regression"


_SPECS = [RunSpec("fake", ModelSpec("fake"), WorkloadSpec(), seed=i, suite="sim", name=f"cell-{i}") for i in range(50)]
_KEYS = [spec.fingerprint() for spec in _SPECS]


def _record(cell: int, repeat: int, speed: float) -> RunRecord:
    metrics = {"generation_throughput_tok_s": speed}
    return RunRecord(_SPECS[cell], _KEYS[cell], repeat, "ok", metrics=metrics)


def main(pairs: int = 2000, powers: int = 1000) -> None:
    """Prints the table."""
    say = sys.stdout.write
    say("| cells | launches a side | order | false alarms | 10 % slowdown seen | 5 % seen | verdicts of A/A cells |\n")
    say("| ---: | ---: | --- | ---: | ---: | ---: | --- |\n")
    for cells, launches, interleaved in _ROWS:
        case = Case(cells, launches, 0.0, interleaved)
        rng, verdicts, alarms = np.random.default_rng(0), Counter[str](), 0
        for _ in range(pairs):
            found = pair(case, rng)
            alarms += alarm(found)
            verdicts.update(c.verdict for c in found.cells)
        power = [rate(Case(cells, launches, s, interleaved), powers, seen, seed=1) for s in (0.10, 0.05)]
        words = ", ".join(f"{v} {n / verdicts.total():.1%}" for v, n in verdicts.most_common())
        order = "interleaved" if interleaved else "one after the other"
        say(f"| {cells} | {launches} | {order} | {alarms / pairs:.2%} | {power[0]:.1%} | {power[1]:.1%} | {words} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
