"""A task of Ray that measures cells on its node: `harness run` in a process of its own, whose records it tells."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.api import HarnessError
from harness.cluster.versions import require_same
from harness.common.files import inside, os_errors
from harness.common.regular_file import parse_json
from harness.common.scratch import scratch_folder
from harness.run.measure import UnmetRequirements
from harness.run.store import RECORDS

_POLL_S, _END_S = 0.1, 30.0
#: The most of a cell's log that travels.
_LOG_BYTES = 4 << 20
#: Linux ends the command when its parent dies, as it would by Ctrl-C.
_TIED = "import ctypes; ctypes.CDLL(None).prctl(1, 15); from harness.__main__ import main; main()"


@dataclass(frozen=True)
class NodeRun:
    """What a node runs: a suite by its file's name and text, the options of `harness run`, and the records that there
    are of these cells, as lines; in the folder where the user gave the command, if the node has one of that name.

    `omp`: the user's OMP_NUM_THREADS, for which Ray has an idea of its own. `engines`: those that run in this
    environment. `versions`: what they need, as the user's host has it.
    """

    name: str
    text: str
    options: tuple[str, ...]
    records: tuple[str, ...]
    cache: Path
    folder: Path
    omp: str | None
    engines: tuple[str, ...]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Told:
    """A record as its line, and its cell's log so far."""

    record: str
    log: str


def run_cells(run: NodeRun) -> Iterator[Told]:
    """Each record when it is written. Raises UnmetRequirements or HarnessError as `harness run` would say it."""
    require_same(run.versions, *run.engines)
    with ExitStack() as opened:
        with os_errors(f"cannot write {run.cache}", "choose another --cache-dir"):
            scratch = opened.enter_context(scratch_folder(run.cache))
            suite, out = scratch / "suite" / run.name, scratch / "out"
            suite.parent.mkdir()
            suite.write_text(run.text)
            out.mkdir()
            (out / RECORDS).write_text("".join(f"{line}\n" for line in run.records))
            said = opened.enter_context((scratch / "stderr").open("w+b"))
        process = opened.enter_context(_command(run, suite, out, said.fileno()))
        position = (out / RECORDS).stat().st_size
        ended = False
        while not ended:
            ended = process.poll() is not None
            for line in _new_lines(out / RECORDS, position):
                position += len(line)
                yield Told(line.decode().rstrip("\n"), _log(out, line))
            time.sleep(0 if ended else _POLL_S)
        said.seek(0)
        _judge(process.returncode, said.read().decode(errors="replace"))


@contextmanager
def _command(run: NodeRun, suite: Path, out: Path, stderr: int) -> Iterator["subprocess.Popen[bytes]"]:
    """The process, which ends with the context."""
    environment = {**os.environ, "CI": "true"}  # lines instead of a live table
    environment.pop("OMP_NUM_THREADS", None)
    if run.omp is not None:
        environment["OMP_NUM_THREADS"] = run.omp
    words = ["run", str(suite), "--out", str(out), "--cache-dir", str(run.cache), "--no-report", *run.options]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _TIED, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env=environment,
        cwd=run.folder if run.folder.is_dir() else None,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
        process.wait()


def _new_lines(path: Path, position: int) -> list[bytes]:
    """The complete lines of a file from a position on."""
    with path.open("rb") as file:
        file.seek(position)
        return [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]


def _log(out: Path, line: bytes) -> str:
    with suppress(OSError, ValueError, KeyError, HarnessError):
        return inside(out, parse_json(line)["log"]).read_bytes()[-_LOG_BYTES:].decode(errors="replace")
    return ""


def _judge(code: int, said: str) -> None:
    """Raises what ended the command; a cell that failed is in its record."""
    if code in (0, 1):
        return
    lines = [line.removeprefix("harness: ") for line in said.splitlines() if line.startswith("harness: ")]
    why = lines[-1] if lines else (said.strip().splitlines() or [f"harness run ended with code {code}"])[-1]
    raise (UnmetRequirements if code == 3 else HarnessError)(why)
