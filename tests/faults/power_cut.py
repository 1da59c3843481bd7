"""A power cut at any moment: states that the disk may then have, and the same command again on each."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.faults.bench import Bench, run
from tests.faults.jobs import GENERATE, OFFLOAD, RUN, Job, output
from tests.faults.power import Disk, Entry, encoded, entries
from tests.integration.conftest import Cli

_JOBS = (RUN, GENERATE, OFFLOAD)


def trial(bench: Bench, seed: int) -> None:
    """Nothing that was acknowledged is lost, and the next run completes."""
    rng, job = random.Random(seed), _JOBS[seed % len(_JOBS)]
    cli, recorded = _recorded(bench, job)
    disk = Disk(cli.folder)
    for entry in recorded[: rng.randint(0, len(recorded))]:
        disk.apply(entry)
    acknowledged = disk.acknowledged(_answers(job, cli)).split(b"\n")[:-1]
    _empty(cli)
    disk.cut(rng, cli.folder)
    (cli.folder / "tmp").mkdir(exist_ok=True)
    job.prepare(cli, bench)  # its inputs are older than the cut
    bench.require_whole(job, cli, acknowledged)


def _answers(job: Job, cli: Cli) -> Path:
    return cli.out / "records.jsonl" if job is RUN else output(cli)


def _recorded(bench: Bench, job: Job) -> tuple[Cli, list[Entry]]:
    """A place, and the record of an undisturbed run there, made once."""
    log = bench.folder / f"power-{job.name}.log"
    name = f"power-{job.name}"
    if log.exists():
        return Cli((bench.folder / name).resolve()), entries(log)
    bench.reference(job)  # compiles kernels: their folder is a link, so that no record would tell of their syncs
    cli = bench.place(name)
    job.prepare(cli, bench)
    run(cli, job.command(cli), bench.shim(cli, log=log).environment())
    whole = list(_with_unseen_writes(entries(log)))
    log.write_bytes(b"".join(map(encoded, whole)))
    return cli, whole


def _with_unseen_writes(recorded: list[Entry]) -> Iterator[Entry]:
    """The record, with a write before the first sync of a file of which none was seen: memory maps write unseen."""
    written = {entry.path for entry in recorded if entry.call == "write"}
    for i, entry in enumerate(recorded):
        if entry.call == "sync" and entry.path not in written:
            written.add(entry.path)
            now = entry.path
            for later in recorded[i:]:
                if later.call == "rename" and f"{now}/".startswith(f"{later.path}/"):
                    now = later.to + now.removeprefix(later.path)
            if Path(now).is_file():
                yield Entry("create", entry.path, "", 0, b"")
                yield Entry("write", entry.path, "", 0, Path(now).read_bytes())
        yield entry


def _empty(cli: Cli) -> None:
    for path in cli.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
