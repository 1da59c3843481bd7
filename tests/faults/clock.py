"""The wall clock jumps while a command runs."""

import random

import jsonschema

from harness.api import to_json
from harness.schema import run_record_schema
from tests.faults.bench import Bench, run
from tests.faults.jobs import GENERATE, RUN

_JOBS = (RUN, GENERATE)
_HOUR = 3600
_JUMPS = (-10 * 365 * 24 * _HOUR, -_HOUR, _HOUR, 10 * 365 * 24 * _HOUR)


def trial(bench: Bench, seed: int) -> None:
    """Answers, durations and timeouts are those of a steady clock, and records are valid."""
    rng, job = random.Random(seed), _JOBS[seed % len(_JOBS)]
    expected = bench.reference(job)
    cli = bench.place(f"clock-{seed}")
    job.prepare(cli, bench)
    jump = rng.choice(_JUMPS)
    shim = bench.shim(cli, calls="", clock_at=rng.randint(0, 60), clock_jump=jump)
    run(cli, job.command(cli), shim.environment())
    assert job.outcome(cli) == expected.outcome
    for record in cli.records() if job is RUN else ():
        jsonschema.validate(to_json(record), run_record_schema())
        durations = {name: value for name, value in record.metrics.items() if name in ("launch_s", "import_s")}
        durations["wall_s"] = record.wall_s
        odd = {name: value for name, value in durations.items() if not 0 <= value < abs(jump)}
        assert not odd, f"a jump of {jump} s shows in {odd}"
    bench.require_whole(job, cli, job.lines(cli))
