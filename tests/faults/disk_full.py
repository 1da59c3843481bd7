"""A disk that is full, or fails, at each call that changes a file, in turn."""

import errno
import random

from tests.faults.bench import Bench, run
from tests.faults.jobs import GENERATE, OFFLOAD, REPORT, RUN

_JOBS = (RUN, GENERATE, OFFLOAD, REPORT)


def trial(bench: Bench, seed: int) -> None:
    """The command ends well, or in one line and the exit code for it; without the fault it completes.

    Seeds from 0 to four times a job's number of calls meet each of its calls once.
    """
    rng, job = random.Random(seed), _JOBS[seed % len(_JOBS)]
    expected = bench.reference(job)
    numbers = random.Random(0).sample(range(1, expected.writes + 1), expected.writes)
    cli = bench.place(f"disk_full-{seed}")
    job.prepare(cli, bench)
    number = numbers[seed // len(_JOBS) % len(numbers)]
    how = rng.choice((errno.ENOSPC, errno.ENOSPC, errno.EDQUOT, errno.EIO))
    shim = bench.shim(cli, at=number, how=how, lasting=rng.random() < 0.5)
    done = run(cli, job.command(cli), shim.environment(), code=None)
    told = f"call {number} of {expected.writes} ({shim.what}, {errno.errorcode[how]}): {done.returncode} {done.stderr}"
    assert "cannot print" not in done.stderr, told  # what the command line says of an error that nobody has named
    if done.returncode == 0:
        assert job.outcome(cli) == expected.outcome, told
    elif done.returncode == 1:  # a cell failed; a job has nothing that may fail
        assert job is RUN and "failed: " in done.stderr, told
    else:
        assert done.returncode == 2 and done.stderr.count("harness: ") == 1, told
        assert done.stderr.rstrip().splitlines()[-1].startswith("harness: "), told
    bench.require_whole(job, cli, job.lines(cli))
