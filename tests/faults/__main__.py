"""`python -m tests.faults LANE [--count N] [--seed S] [--minutes M]`: a lane at length, and what failed in it."""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.bench import Bench
from tests.faults.lanes import LANES, trial_of


def main() -> int:
    """Prints each failure with the command that repeats it, and counts; returns 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("lane", choices=[*LANES, "all"])
    parser.add_argument("--count", type=int, help="trials of a lane, of all at most so many [default: its full length]")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the next ones follow it")
    parser.add_argument("--minutes", type=float, default=360.0, help="how long a soak lasts [default: 360]")
    parser.add_argument("--stop", type=float, default=60.0, help="seconds for which a process is stopped [default: 60]")
    parser.add_argument("--patience", type=float, default=2.0, help="seconds that processes get to end [default: 2]")
    given = parser.parse_args()
    failed = 0
    for lane in LANES if given.lane == "all" else (given.lane,):
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            bench = Bench(Path(folder), given.patience, given.stop, given.minutes)
            count = LANES[lane] if given.count is None else given.count
            if given.lane == "all":
                count = min(count, LANES[lane])
            failed += _lane(bench, lane, range(given.seed, given.seed + count))
    return 1 if failed else 0


def _lane(bench: Bench, lane: str, seeds: range) -> int:
    """Runs the trials of a lane; returns how many failed."""
    trial, failed, began = trial_of(lane), 0, time.monotonic()
    for seed in seeds:
        try:
            trial(bench, seed)
        except (AssertionError, subprocess.TimeoutExpired) as exc:
            failed += 1
            _say(f"FAILED {lane} {seed}: {exc}\n  again: python -m tests.faults {lane} --count 1 --seed {seed}")
        for path in bench.folder.glob(f"{lane}-{seed}*"):
            shutil.rmtree(path, ignore_errors=True)
    _say(f"{lane}: {len(seeds)} trials, {failed} failed, {time.monotonic() - began:.0f} s")
    return failed


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
