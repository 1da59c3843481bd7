"""SIGSTOP for some time, of the command or of its worker, then SIGCONT: as on a laptop that sleeps."""

import random
import signal
import time

from tests.faults.bench import Bench, require_no_traceback, start
from tests.faults.jobs import GENERATE, RUN
from tests.faults.processes import Marker, send

_JOBS = (RUN, RUN, GENERATE)
#: The timeout of the run's cells.
_TIMEOUT_S = 20.0


def trial(bench: Bench, seed: int) -> None:
    """The command ends as it should; a cell whose time ran out meanwhile may have timed out."""
    rng, job, marker = random.Random(seed), _JOBS[seed % len(_JOBS)], Marker()
    expected = bench.reference(job)
    cli = bench.place(f"stop-{seed}")
    job.prepare(cli, bench)
    process = start(cli, job.command(cli), marker)
    time.sleep(rng.uniform(0.0, expected.seconds))
    workers = marker.workers()
    victim = rng.choice(workers) if workers and rng.random() < 0.5 else process.pid
    send(victim, signal.SIGSTOP)
    time.sleep(bench.stop_s)
    send(victim, signal.SIGCONT)
    code = process.wait(timeout=300)
    require_no_traceback(cli)
    marker.require_gone(bench.patience_s)
    statuses = {r.status for r in cli.records()} if job is RUN else {"ok"}
    assert statuses <= ({"ok", "timeout"} if bench.stop_s > _TIMEOUT_S / 2 else {"ok"}), statuses
    assert code == (0 if statuses == {"ok"} else 1)
    if statuses == {"ok"}:
        bench.require_whole(job, cli, job.lines(cli))
