"""Several harnesses at once: on one cold cache, on one run directory, on one output."""

import shutil
import subprocess

from tests.faults.bench import Bench, require_no_traceback, said_file, start
from tests.faults.jobs import GENERATE, OFFLOAD, RUN, output
from tests.faults.processes import Marker
from tests.integration.conftest import Cli

#: What all but one say of a place that is taken.
_REFUSALS = {"run": "is in use by another harness", "generate": "is being written by another harness"}
_LONGEST_S = 600
_CASES = ((RUN, 8), (GENERATE, 8), (OFFLOAD, 2), (RUN, 2), (GENERATE, 2), (OFFLOAD, 8))


def trial(bench: Bench, seed: int) -> None:
    """All are refused in the documented line or end well, at least one of them does, and the outcome is one job's."""
    job, count = _CASES[seed % len(_CASES)]
    name = f"crowd-{seed}"
    if job is OFFLOAD:
        _share_a_cache(bench, name, count)
        return
    cli = bench.place(name)
    job.prepare(cli, bench)
    crowd = [bench.place(f"{name}-said-{i}") for i in range(count)]
    processes = [_started(cli, member, job.command(cli)) for member in crowd]
    codes = [process.wait(timeout=_LONGEST_S) for process in processes]
    for member, code in zip(crowd, codes, strict=True):
        require_no_traceback(member)
        told = said_file(member).read_text()
        assert code == 0 or (code == 2 and _REFUSALS[job.name] in told), f"{code}: {told}"
    assert 0 in codes
    bench.require_whole(job, cli, job.lines(cli))


def _share_a_cache(bench: Bench, name: str, count: int) -> None:
    """Each converts the model, or waits for the one that does, and answers in a place of its own."""
    crowd = [bench.place(f"{name}-{i}") for i in range(count)]
    for cli in crowd:
        OFFLOAD.prepare(cli, bench)
    shared = {"HARNESS_CACHE": str(crowd[0].folder / "cache")}
    for cli in crowd[1:]:
        shutil.rmtree(cli.folder / "tiny-llama")
        (cli.folder / "tiny-llama").symlink_to(crowd[0].folder / "tiny-llama")
    processes = [start(cli, OFFLOAD.command(cli), Marker(), shared) for cli in crowd]
    codes = [process.wait(timeout=_LONGEST_S) for process in processes]
    assert set(codes) == {0}, [said_file(cli).read_text() for cli in crowd]
    for cli in crowd:
        require_no_traceback(cli)
        assert OFFLOAD.outcome(cli) == bench.reference(OFFLOAD).outcome, output(cli)
    assert len([p for p in (crowd[0].folder / "cache" / "offload").iterdir() if p.is_dir()]) == 1, "converted once"


def _started(cli: Cli, member: Cli, command: list[str]) -> subprocess.Popen[str]:
    """A command on `cli`'s files that speaks and has its temporary files at the member's place."""
    return start(member, command, Marker(), {"HARNESS_CACHE": str(cli.folder / "cache")})
