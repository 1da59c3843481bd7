"""Commands that need no Linux work without what only Linux has, and the others say so: in a Python that lacks it."""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.api import HarnessError
from harness.common import system
from harness.common.files import replacing
from harness.common.line_file import LineFile
from harness.common.locks import locked
from harness.common.system import LOCK_EX, LOCK_NB, LOCK_SH, flock
from harness.hardware import provenance
from harness.suite.shipped import find_suite

ROOT = Path(__file__).parents[2]
#: What commands import beside our modules: of refusals, and what reports, histories and images add.
FEW = ("click", "psutil", "pydantic.type_adapter", "rich.live", "tempfile", "urllib.request", "yaml")
ALL = (*FEW, "asyncio", "docker", "jinja2", "multiprocessing.pool", "ruptures", "scipy.stats", "sqlalchemy",
       "urllib.request", "venv")  # fmt: skip
RUN = ROOT / "docs" / "results" / "quickstart-2026-11-25-2"
SYSTEMS = {"darwin": "Darwin", "win32": "Windows"}


def on(name: str, libraries: Sequence[str], tmp_path: Path, *commands: Sequence[object]) -> list[tuple[int, str]]:
    """Exit code and output of each command, in one Python that pretends to be on a system."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.other_system", name, *libraries],
        input=json.dumps([list(map(str, command)) for command in commands]),
        env=os.environ | {"HARNESS_CACHE": str(tmp_path / "cache"), "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(each) for each in json.loads(done.stdout)]


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_needs_linux_says_so_in_a_line_and_leaves_nothing(name, tmp_path):
    results = on(
        name, FEW, tmp_path,
        ["run", "ci_smoke", "--out", tmp_path / "out"],
        ["generate", "--model", "m", "--prompt", "p"],
        ["chat", "--model", "m"],
        ["calibrate"],
    )  # fmt: skip
    for (code, text), what in zip(results, ("harness run", "engine offload", "engine offload", "harness calibrate"),
                                  strict=True):  # fmt: skip
        assert code == 2, text
        assert text.startswith(f"harness: {what} needs Linux, and this is {SYSTEMS[name]}: ")
        assert "report, compare, history and validate work here" in text and text.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("name", SYSTEMS)
def test_plans_reports_and_comparisons_work(name, tmp_path):
    results = on(
        name, ALL, tmp_path,
        ["--help"],
        ["validate", "suites/ci_smoke.yaml"],
        ["ls", "engines"],
        ["doctor"],
        ["plan", "facebook/opt-6.7b", "--prompt-len", "512", "--gen-len", "32", "--hardware", "t4_gcp"],
        ["run", "ci_smoke", "--simulate", "--hardware", "laptop_cpu", "--out", tmp_path / "simulated"],
        ["report", RUN, "--out", tmp_path / "report.html"],
        ["compare", RUN, "--against", "accelerate"],
        ["history", "add", "--db", f"sqlite:///{tmp_path / 'h.db'}", RUN],
        ["init", "--model", "facebook/opt-1.3b", "--out", tmp_path / "suite.yaml"],
        ["completion", "bash"],
        ["cache", "ls"],
    )  # fmt: skip
    told = [text for code, text in results if code not in (0, 1) or "Traceback" in text]
    assert not told
    engines, doctor, plan = (results[i][1] for i in (2, 3, 4))
    assert "needs Linux" in engines and "ready" not in engines
    assert "you can run no engine: they need Linux; plan, " in doctor
    assert "token/s" in plan
    assert (tmp_path / "simulated" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "report.html").stat().st_size > 10_000


class FakeMsvcrt:
    """Windows's locks of bytes: by file, process-wide."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        self.held: set[tuple[int, int]] = set()

    def locking(self, descriptor: int, mode: int, nbytes: int) -> None:
        place = (os.fstat(descriptor).st_ino, os.lseek(descriptor, 0, os.SEEK_CUR))
        assert (mode, nbytes) == (self.LK_NBLCK, 1)
        if place in self.held:
            raise PermissionError(errno.EACCES, "Permission denied")
        self.held.add(place)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> FakeMsvcrt:
    fake = FakeMsvcrt()
    monkeypatch.setattr(system, "_fcntl", None)
    monkeypatch.setattr(system, "_msvcrt", fake)
    return fake


def test_a_lock_on_windows_keeps_others_out_and_the_content_readable(windows, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with path.open("rb") as file:
        file.seek(3)
        flock(file.fileno(), LOCK_EX | LOCK_NB)
        assert file.read() == b"tent"
        with pytest.raises(HarnessError, match="busy"):
            locked(path, "busy")
    ((_, place),) = windows.held
    assert place > path.stat().st_size


@pytest.mark.parametrize("operation", [LOCK_SH, LOCK_SH | LOCK_NB])
def test_shared_locks_are_none_on_windows_as_on_file_systems_without_locks(windows, operation, tmp_path):
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError) as caught:
        flock(file.fileno(), operation)
    assert not isinstance(caught.value, BlockingIOError)
    assert not windows.held


@pytest.mark.parametrize("renames_open", [True, False])
def test_a_file_is_replaced_whether_or_not_it_may_be_open(renames_open, monkeypatch, tmp_path):
    monkeypatch.setattr("harness.common.files.RENAMES_OPEN_FILES", renames_open)
    was_open = []
    original = Path.replace

    def replace(self: Path, target: Path) -> Path:
        was_open.append(not file.closed)
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with replacing(tmp_path / "file") as file:
        file.write(b"new")
    assert was_open == [renames_open]
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new"]


def test_lines_are_appended_without_reading_at_an_offset(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "pread")
    monkeypatch.delattr(os, "O_DIRECTORY")
    lines = LineFile(tmp_path / "lines")
    for line in (b"1", b"22"):
        lines.append(line)
    assert (tmp_path / "lines").read_bytes() == b"1\n22\n"


def test_advice_on_the_page_cache_is_left_out_where_there_is_none(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "posix_fadvise")
    monkeypatch.delattr(os, "sched_getaffinity")
    with (tmp_path / "file").open("wb") as file:
        system.drop_from_page_cache(file.fileno())
    assert system.usable_cpus() == os.cpu_count()


def test_a_tool_that_hangs_is_ended_where_there_are_no_process_groups(monkeypatch):
    monkeypatch.delattr(os, "killpg")
    monkeypatch.setattr(provenance, "_TOOL_S", 0.1)
    began = time.monotonic()
    assert provenance.said_by([sys.executable, "-c", "import time; time.sleep(60)"]) is None
    assert time.monotonic() - began < 50


def test_a_shipped_suite_with_a_dot_in_its_name_is_found_by_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert find_suite("cpu_offload_6.7b").is_file()
    (tmp_path / "quickstart").mkdir()
    assert find_suite("quickstart").is_file(), "a folder is no suite"
    Path("ci_smoke").write_text("own")
    assert find_suite("ci_smoke") == Path("ci_smoke"), "a file of the user comes first"
