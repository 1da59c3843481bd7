"""Simulated comparisons: how often `compare` raises a false alarm, and how often it sees a slowdown.

`python -m tests.simulate_compare` prints the tables of docs/guides/regressions.md (minutes). Launches come as
`ci/interleave.sh` makes them, round by round, the side that is first in turn; or one run after the other.
`tests.simulate_noise` has the noise.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.api import ModelSpec, RunRecord, RunSpec, WorkloadSpec
from reports.compare import compare_records
from reports.records import Runs
from reports.speed import Rules
from reports.verdicts import Comparison
from tests.simulate_noise import Kind, noise


@dataclass(frozen=True)
class Case:
    """A suite of `cells` cells, `launches` on each side; the first cell of the head is `slowdown` slower.

    `runs`: None for sides in turns, else how many runs of the base precede the head's, all after each other; the first
    is the base and the others are A/A runs.
    """

    cells: int
    launches: int
    slowdown: float = 0.0
    variation: float = 0.05
    kind: Kind = "all three"
    runs: int | None = None


def turns(launches: int) -> list[int]:
    """Sides, 0 and 1, in the order of `ci/interleave.sh`."""
    return [side for r in range(launches) for side in ((0, 1) if r % 2 == 0 else (1, 0))]


def pair(case: Case, rng: np.random.Generator) -> Comparison:
    """One simulated comparison."""
    sides = case.runs or 1
    order = turns(case.launches) if case.runs is None else sorted(list(range(sides + 1)) * case.launches)
    (deviations,) = np.exp(noise(case.kind, case.variation, 1, len(order) * case.cells, rng))
    runs: list[list[RunRecord]] = [[] for _ in range(sides + 1)]
    for i, side in enumerate(order):
        for cell in range(case.cells):
            slower = case.slowdown if side == sides and cell == 0 else 0.0
            number = i * case.cells + cell
            repeat = len(runs[side]) // case.cells
            runs[side].append(_record(cell, repeat, number, 10.0 * deviations[number] * (1 - slower)))
    base, *again, head = (Runs(tuple(run)) for run in runs)
    return compare_records(base, head, Rules(again=tuple(again)))


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


def _record(cell: int, repeat: int, number: int, speed: float) -> RunRecord:
    metrics = {"generation_throughput_tok_s": speed}
    started_at = f"2026-11-01T{number // 60:03}:{number % 60:02}"
    return RunRecord(_SPECS[cell], _KEYS[cell], repeat, "ok", started_at=started_at, metrics=metrics)


#: Of the tables: what their first columns say, and the case.
_POWER = [((f"{v:.0%}", kind, "5", str(n)), Case(5, n, 0.0, v, kind))
          for v, kind, launches in ((0.02, "all three", (7,)), (0.05, "normal", (7,)), (0.05, "heavy tails", (7,)),
                                    (0.05, "drift", (7,)), (0.05, "slow stretches", (7,)),
                                    (0.05, "all three", (5, 7, 10, 15)), (0.10, "all three", (7, 10, 15)),
                                    (0.16, "all three", (7, 15)))
          for n in launches]  # fmt: skip
_CELLS = [(("5%", "all three", str(cells), "7"), Case(cells, 7)) for cells in (1, 30)]
_KINDS: list[tuple[float, Kind]] = [(0.05, "drift"), (0.02, "all three"), (0.05, "all three")]
_RUNS = [((str(runs - 1), f"{v:.0%}", kind), Case(5, 7, 0.0, v, kind, runs))
         for runs in (1, 2, 4, 6) for v, kind in _KINDS]  # fmt: skip


def _rows(titles: str, rows: list[tuple[tuple[str, ...], Case]], pairs: int, powers: int) -> None:
    say = sys.stdout.write
    say(f"| {titles} | false alarms | 20 % slowdown seen | 10 % seen | verdicts of equal cells |\n")
    say("|" + " --- |" * (titles.count("|") + 1) + " ---: | ---: | ---: | --- |\n")
    for names, case in rows:
        rng, verdicts, alarms = np.random.default_rng(0), Counter[str](), 0
        for _ in range(pairs):
            found = pair(case, rng)
            alarms += alarm(found)
            verdicts.update(c.verdict for c in found.cells)
        power = [rate(Case(case.cells, case.launches, s, case.variation, case.kind, case.runs), powers, seen, seed=1)
                 for s in (0.20, 0.10)]  # fmt: skip
        words = ", ".join(f"{v} {n / verdicts.total():.1%}" for v, n in verdicts.most_common())
        say(f"| {' | '.join(names)} | {alarms / pairs:.2%} | {power[0]:.0%} | {power[1]:.0%} | {words} |\n")
        sys.stdout.flush()


def main(pairs: int = 1000, powers: int = 200) -> None:
    """Prints the tables."""
    _rows("variation | noise | cells | launches a side", [*_POWER, *_CELLS], pairs, powers)
    sys.stdout.write("\n")
    _rows("A/A runs | variation | noise", _RUNS, pairs, powers)


if __name__ == "__main__":
    main()
