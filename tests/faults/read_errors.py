"""Reads that fail, that are short, or that find their file cut: of inputs, checkpoints, tiles, KV blocks, records."""

import errno
import random
import shutil

from tests.faults.bench import Bench, run
from tests.faults.jobs import GENERATE, OFFLOAD, REPORT, RUN, output
from tests.faults.shim import READS

#: A job, and what of its place is read with faults. A line of an input that was cut is no error that anybody can see.
_CASES = (
    (OFFLOAD, "cache/offload", ("cut", "short", errno.EIO)),
    (OFFLOAD, "tiny-llama", ("cut", "short", errno.EIO)),
    (OFFLOAD, "cache/work", ("cut", "short", errno.EIO)),
    (GENERATE, "in.jsonl", ("short", errno.EIO)),
    (RUN, "out", ("short", errno.EIO)),
    (REPORT, "out", ("short", errno.EIO)),
)


def trial(bench: Bench, seed: int) -> None:
    """A clear line and no wrong answer; short reads, which are lawful, change nothing."""
    rng = random.Random(seed)
    job, where, hows = _CASES[seed % len(_CASES)]
    how = hows[seed // len(_CASES) % len(hows)]
    expected = bench.reference(job)
    cli = bench.place(f"read_errors-{seed}")
    job.prepare(cli, bench)
    run(cli, job.command(cli))  # converts, so that there is something to read
    if job is OFFLOAD or job is GENERATE:
        counted = bench.shim(cli, cli.folder / where, calls=READS)
        output(cli).unlink()
        run(cli, job.command(cli), counted.environment())
        output(cli).unlink()
    else:
        counted = bench.shim(cli, cli.folder / where, calls=READS)
        run(cli, job.command(cli), counted.environment())
    before = job.lines(cli)
    if not counted.calls:
        return
    number = rng.randint(1, counted.calls)
    shim = bench.shim(cli, cli.folder / where, calls=READS, at=number, how=how)
    done = run(cli, job.command(cli), shim.environment(), code=None)
    told = f"read {number} of {counted.calls} ({shim.what}, {how}): {done.returncode} {done.stderr}"
    assert done.returncode in ((0,) if how == "short" else (0, 1, 2)), told
    assert "cannot print" not in done.stderr, told  # what the command line says of an error that nobody has named
    if done.returncode == 0:
        assert job.outcome(cli) == expected.outcome, told
    else:
        assert "harness: " in done.stderr or "failed: " in done.stderr, told
    if how == "cut":  # as the line says: what is damaged is removed, and made again
        shutil.rmtree(cli.folder / "cache" / "offload")
        shutil.rmtree(cli.folder / "tiny-llama")
        shutil.copytree(bench.model, cli.folder / "tiny-llama")
    answered = job.lines(cli)
    assert answered[: len(before)] == before, told
    bench.require_whole(job, cli, answered)
