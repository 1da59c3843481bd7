"""What a case left behind: processes, memory groups, temporary and half-written files."""

import contextlib
import json
import os
import re
import signal
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from harness.common.host_memory import CGROUP_ROOT, memory_cgroups
from tests.barrage.case import SECRET

#: The variable that marks the processes of a case.
MARK = "BARRAGE_CASE"
#: Names of temporary files and folders: of atomic replacement, of answers, of built models, of jobs.
_TEMPORARY = re.compile(r"\..*\.\d+(\.tmp)?|\..*\.new-\d+|.*\.tmp-\d+|harness-job-.*")
#: What the runner itself makes in the folder of a case.
OWN = frozenset({"work", "tmp", "home", "stdout", "stderr"})
#: Reports and comparisons are written whole or not at all.
_REPORTS = (".html", ".md", ".csv", ".xml")
_GRACE_S = 2.0
_MOST_BYTES = 64 << 20
#: Processes that were there before any case: to read all their environments after each case would take long.
_OTHERS = frozenset(psutil.pids())

#: Size and time of change by file.
Snapshot = Mapping[str, tuple[int, int]]


def snapshot(folder: Path) -> Snapshot:
    """The regular files below a folder."""
    found = {}
    for path, status in _files(folder):
        if stat.S_ISREG(status.st_mode):
            found[str(path)] = status.st_size, status.st_mtime_ns
    return found


def leftovers(folder: Path, pid: int, code: int, before: Snapshot) -> tuple[str, ...]:
    """What the case in `folder` left, in words. `pid`: its process, which has ended with `code`; `before`: the files of
    its folder `work` when it started. Processes are ended."""
    found = [f"process {process.pid} ({name})" for process, name in ended(pid, folder.name)]
    found += [f"memory group {group.name}" for group in _groups(pid)]
    found += [f"tmp/{name}" for name in sorted(path.name for path in (folder / "tmp").iterdir())]
    found += [f"{name} beside its folder" for name in sorted({path.name for path in folder.iterdir()} - OWN)]
    found += [str(path.relative_to(folder)) for path, _ in _files(folder / "work") if _TEMPORARY.fullmatch(path.name)]
    exchanges = folder / "work" / "cache" / "work"
    found += [f"cache/work/{path.parent.name}/{path.name}" for path in exchanges.glob("*/*")]
    found += [f"the secret in {Path(path).name}" for path in _with_secret(folder / "work", before)]
    found += [f"{Path(path).name} is half-written" for path in _half_written(folder / "work", code, before)]
    return tuple(found)


def ended(pid: int, mark: str) -> list[tuple[psutil.Process, str]]:
    """The processes that a case started and that did not end with it, a moment later; kills them."""
    deadline = time.monotonic() + _GRACE_S
    while (alive := list(_processes(pid, mark))) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process, _ in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    return alive


def _processes(pid: int, mark: str) -> Iterator[tuple[psutil.Process, str]]:
    """Live processes of the session `pid`, and those with the mark in their environment."""
    for process in psutil.process_iter():
        if process.pid in _OTHERS:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            ours = os.getsid(process.pid) == pid or process.environ().get(MARK) == mark
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                yield process, process.name()


def _groups(pid: int) -> Iterator[Path]:
    """Memory groups that the process made; their names begin with its id."""
    parents = {base for _, group in memory_cgroups() for base in (group, *group.parents)}
    for parent in parents:
        if parent.is_relative_to(CGROUP_ROOT):
            yield from parent.glob(f"harness-{pid}-*")


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything below a folder; links are not followed."""
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root) / name
            with contextlib.suppress(OSError):
                yield path, path.lstat()


def _half_written(work: Path, code: int, before: Snapshot) -> Iterator[str]:
    """New files that are not whole, and reports of an input that was refused."""
    for path, status in snapshot(work).items():
        size, _ = status
        if before.get(path) == status or not size or size > _MOST_BYTES:
            continue
        try:
            suffix, content = Path(path).suffix, Path(path).read_bytes()
        except OSError:  # made without the right to read it
            continue
        half = {
            ".jsonl": lambda text: not text.endswith(b"\n"),
            ".html": lambda text: b"</html>" not in text[-100:],
            ".json": lambda text: not _is_json(text),
        }
        new_report = suffix in _REPORTS and path not in before and not _has_run(Path(path).parent)
        if (suffix in half and half[suffix](content)) or (code == 2 and new_report):
            yield path


def _with_secret(work: Path, before: Snapshot) -> Iterator[str]:
    """New files that hold the secret of a case."""
    for path, status in snapshot(work).items():
        if before.get(path) != status and status[0] <= _MOST_BYTES:
            with contextlib.suppress(OSError):
                if SECRET.encode() in Path(path).read_bytes():
                    yield path


def _has_run(folder: Path) -> bool:
    """Whether a run left its records: then it leaves the reports that it could write, too."""
    return (folder / "records.jsonl").exists()


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
