"""Where trials run: a folder for each, the expensive things that they share, and what every trial must find."""

import os
import re
import subprocess
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.common.host_memory import memory_cgroups
from tests.faults.jobs import Job
from tests.faults.processes import Marker
from tests.faults.shim import WRITES, Fault, Shim
from tests.integration.conftest import Cli

#: Names of what is only there while it is written.
_TEMPORARY = re.compile(r"\.tmp-\d+$|^\..*\.tmp$|^tmp.{6,}$|\.probe$")
_WRONG = re.compile(r"damaged|truncated|cannot|could not|was moved|failed|not predicted|Error|died of")


@dataclass(frozen=True)
class Reference:
    """What an undisturbed run gives, how long it takes, and how many calls change files."""

    outcome: Any
    seconds: float
    writes: int


@dataclass
class Bench:
    """`patience_s`: how long processes may live after a kill; `stop_s`: how long they are stopped; `minutes`: of a
    soak."""

    folder: Path
    patience_s: float = 2.0
    stop_s: float = 60.0
    minutes: float = 360.0
    _references: dict[str, Reference] = field(default_factory=dict)

    def place(self, name: str) -> Cli:
        """A new folder for a command."""
        folder = self.folder / name
        (folder / "tmp").mkdir(parents=True)
        return Cli(folder.resolve())

    @cached_property
    def model(self) -> Path:
        """A small model with a tokenizer, which trials copy before they damage it."""
        from tests.offload import save_with_tokenizer  # imports torch

        return save_with_tokenizer(self.folder / "model" / "tiny-llama")

    def reference(self, job: Job) -> Reference:
        """That of a job, found once."""
        if job.name not in self._references:
            cli = self.place(f"reference-{job.name}")
            job.prepare(cli, self)
            shim = self.shim(cli, calls=WRITES)
            began = time.monotonic()
            run(cli, job.command(cli), shim.environment())
            self._references[job.name] = Reference(job.outcome(cli), time.monotonic() - began, shim.calls)
        return self._references[job.name]

    def shim(self, cli: Cli, folder: Path | None = None, **fault: Any) -> Shim:
        """A shim for a command: what happens to files below `folder`, by default all of the place."""
        return Shim(Fault(folder or cli.folder, **fault), self.folder / f"{cli.folder.name}.state")

    def require_whole(self, job: Job, cli: Cli, before: list[bytes]) -> None:
        """Runs the command again, to its end: it says nothing wrong, loses nothing of `before`, doubles nothing, gives
        what an undisturbed run does, and leaves nothing behind."""
        done = run(cli, job.command(cli))
        assert not (wrong := _WRONG.search(done.stderr)), f"it says {wrong and wrong[0]!r}: {done.stderr}"
        after = job.lines(cli)
        assert after[: len(before)] == before, f"lost: {len(before)} lines were there, {len(after)} are"
        assert job.outcome(cli) == self.reference(job).outcome, "another outcome than an undisturbed run's"
        assert not (left := leftovers(cli.folder)), f"left behind: {left}"


def environment(cli: Cli, *more: dict[str, str]) -> dict[str, str]:
    """Of a command: temporary files in its place, one thread."""
    variables = cli.environment | {"TMPDIR": str(cli.folder / "tmp"), "OMP_NUM_THREADS": "1"}
    for each in more:
        variables |= each
    return variables


def run(cli: Cli, command: list[str], *more: dict[str, str], code: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, which comes with `code` (None: any) and without a traceback."""
    return cli.execute(command, code, env=environment(cli, *more))


def start(cli: Cli, command: list[str], marker: Marker, *more: dict[str, str]) -> subprocess.Popen[str]:
    """A command in the background; what it says goes to a file, so that nothing waits for a reader."""
    with said_file(cli).open("wb") as sink:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, cwd=cli.folder,
            env=environment(cli, marker.environment, *more), text=True,
        )  # fmt: skip


def said_file(cli: Cli) -> Path:
    """What a command that was started has said, outside its place."""
    return cli.folder.with_suffix(".said")


def require_no_traceback(cli: Cli) -> None:
    """Of the command that was started."""
    text = said_file(cli).read_text(errors="replace")
    assert "Traceback" not in text and "Fatal Python" not in text, text


def leftovers(folder: Path) -> list[str]:
    """Temporary files and folders below a place."""
    left = [path for path in folder.rglob("*") if _TEMPORARY.search(path.name)]
    left += (path for path in (folder / "tmp").iterdir() if not _tries_a_folder(path))
    left += (folder / "cache" / "work").glob("*")
    return sorted({str(path.relative_to(folder)) for path in left})


def _tries_a_folder(path: Path) -> bool:
    """Whether Python's tempfile wrote `blat` to see whether it can, and was ended before it removed the file. A power
    cut may leave zeros, or a part."""
    return bool(re.fullmatch(r"[a-z0-9_]{8}", path.name)) and path.is_file() and path.stat().st_size <= len("blat")


def groups_of(pid: int) -> list[str]:
    """Memory cgroups that a harness has made."""
    bases = {base for _, group in memory_cgroups() for base in (group, *group.parents)}
    return [str(path) for base in bases if os.access(base, os.R_OK) for path in base.glob(f"harness-{pid}-*")]
