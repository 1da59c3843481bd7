"""kill -9 at a random instant, of the command or of a process that it started; then the same command again."""

import random
import signal
import time

from tests.faults.bench import Bench, groups_of, require_no_traceback, start
from tests.faults.jobs import CALIBRATE, GENERATE, KERNEL, OFFLOAD, REPORT, RUN, Job
from tests.faults.processes import Marker, send

#: In turn; a calibration takes a minute, and every thirtieth trial is one.
_JOBS = (RUN, GENERATE, OFFLOAD, RUN, KERNEL, REPORT)


def _job(seed: int) -> Job:
    return CALIBRATE if seed % 30 == 29 else _JOBS[seed % len(_JOBS)]


def trial(bench: Bench, seed: int) -> None:
    """Nothing that was acknowledged is lost or doubled, no process stays, and the second run finishes the job."""
    rng, job, marker = random.Random(seed), _job(seed), Marker()
    expected = bench.reference(job)
    cli = bench.place(f"kill-{seed}")
    job.prepare(cli, bench)
    process = start(cli, job.command(cli), marker)
    time.sleep(rng.uniform(0.0, expected.seconds))
    others = sorted(set(marker.living()) - {process.pid})
    if others and rng.random() < 0.4:
        send(rng.choice(others), signal.SIGKILL)  # the command goes on without it, and ends by itself
    else:
        send(process.pid, signal.SIGKILL)
    process.wait(timeout=300)
    marker.require_gone(bench.patience_s)
    require_no_traceback(cli)
    bench.require_whole(job, cli, job.lines(cli))
    assert not (left := groups_of(process.pid)) or job is not RUN, f"cgroups left: {left}"
