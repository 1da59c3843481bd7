"""`python -m tests.load LANE`: a server under load at length, and what was found, with counts."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.load.bench import Bench
from tests.load.lanes import LANES


def main() -> int:
    """Prints what each lane found; returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__)
    parser.add_argument("lane", choices=[*LANES, "all"])
    parser.add_argument("--engine", choices=("fake", "offload"), default="fake")
    parser.add_argument("--model", help="of the offload engine [default: a small random one]")
    parser.add_argument("--memory", default="256MiB", help="that the server may take [default: 256MiB]")
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="as of harness serve")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--cancelled", type=float, default=1 / 3, help="the share that leaves [default: a third]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", type=int, default=3, help="of the overhead [default: 3]")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--body-mib", type=int, default=100, help="of a body that is too large [default: 100]")
    parser.add_argument("--seconds", type=float, default=60.0, help="that slow clients read [default: 60]")
    given = vars(parser.parse_args())
    lane, failed = given.pop("lane"), 0
    for name in LANES if lane == "all" else (lane,):
        with tempfile.TemporaryDirectory(prefix="load-") as folder:
            bench = Bench(Path(folder), **given | {"overrides": tuple(given["overrides"])})
            began = time.monotonic()
            try:
                LANES[name](bench)
                outcome = "nothing wrong"
            except AssertionError as exc:
                failed, outcome = failed + 1, f"FAILED: {exc}"
        sys.stdout.write(f"{name}, engine {bench.engine}: {outcome}, {time.monotonic() - began:.0f} s\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
