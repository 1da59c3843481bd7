"""Runs the real command line on small suites of the fake engine."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.models import checkpoints
from harness.api import ModelSpec, RunRecord, to_json
from harness.run.store import Store
from tests.forked import Forks

FORKS = Forks()
#: Seeds of tests that end a run at random moments; all but one in the slow lane.
RANDOM_SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)))

BASE = """
name: tiny
description: a suite for tests
model: {id: fake}
workload: {kind: synthetic, prompt_len: 8, gen_len: 4}
machine_probe: false
warmup: 0
timeout: 20s
"""
#: Cells that end in the ways that every launcher tells apart.
ENDS = """
  - {name: fine, engine: fake}
  - {name: exception, engine: fake, options: {crash: exception}, expect: error}
  - {name: killed, engine: fake, options: {crash: sigkill}, expect: error}
  - {name: exits, engine: fake, options: {crash: exit}, expect: error}
  - {name: full, engine: fake, options: {crash: enospc}, expect: disk_full}
  - {name: refuses, engine: fake, options: {crash: unsupported}, expect: unsupported}
  - {name: eats, engine: fake, options: {eat_bytes: 400000000}, limits: {host_memory: 100MiB}, expect: oom_host}
  - {name: eats-little, engine: fake, options: {eat_bytes: 30000000}, limits: {host_memory: 100MiB}}
  - {name: hangs, engine: fake, options: {hang: true}, timeout: 3s, expect: timeout}
"""


@dataclasses.dataclass
class Cli:
    """One run directory and the command line on it."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def suite(self, matrix: str = "  - {name: a, engine: fake}", **changes: object) -> Path:
        """Writes a suite: `BASE` with keys replaced or added."""
        lines = [line for line in BASE.strip().splitlines() if line.split(":")[0] not in changes]
        lines += [f"{key}: {value}" for key, value in changes.items()]
        path = self.folder / "tiny.yaml"
        path.write_text("\n".join(lines) + f"\nmatrix:\n{matrix}\n")
        return path

    def command(self, *arguments: object) -> list[str]:
        installed = Path(sys.executable).with_name("harness")
        start = [str(installed)] if installed.exists() else [sys.executable, "-m", "harness"]
        return [*start, *map(str, arguments)]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"HARNESS_CACHE": str(self.folder / "cache"), "CI": "true"}

    def __call__(self, *arguments: object, code: int | None = 0, **options) -> subprocess.CompletedProcess[str]:
        """Runs `harness` with these arguments; it must end with `code` (None: with any) and without a traceback.

        With `options` of `subprocess.run` or other variables of Python in a new interpreter, else in a fork of one.
        """
        if options or not FORKS.fits(os.environ):
            return self.execute(self.command(*arguments), code, **options)
        words = [*map(str, arguments)]
        with (
            Path(os.devnull).open() as nothing,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            files = [file.fileno() for file in (nothing, out, err)]
            ended = FORKS.run(words, self.environment, self.folder, files)
            for file in (out, err):
                file.seek(0)
            return self._ended(subprocess.CompletedProcess(words, ended, out.read(), err.read()), code)

    def refused(self, *arguments: object, **options) -> str:
        """The one line that `harness` says where it refuses these arguments."""
        (line,) = self(*arguments, code=2, **options).stderr.strip().splitlines()
        return line

    def run(self, suite: Path, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
        return self(*self.running(suite), *arguments, **options)

    def running(self, suite: Path, out: Path | None = None) -> tuple[object, ...]:
        """The arguments that run a suite here. Tests share a machine: what disturbs a launch is the next test."""
        return "run", suite, "--out", out or self.out, "--extra-tries", 0

    def execute(self, command: list[str], code: int | None = 0, **options) -> subprocess.CompletedProcess[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command, check=False, **pipes | {"env": self.environment, "cwd": self.folder} | options)
        return self._ended(done, code)

    def _ended(self, done: subprocess.CompletedProcess[str], code: int | None) -> subprocess.CompletedProcess[str]:
        told = f"{done.stdout or ''}{done.stderr or ''}"
        assert "Traceback" not in told, told
        assert code is None or done.returncode == code, told
        return done

    def on_full_disk(self, size: int, *arguments: object, **options) -> str:
        """The refusal of `harness` where no file may grow beyond `size` bytes: as on a full disk, writes fail."""
        script = (
            "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
            "from harness.cli.main import main; main()"
        )
        return self.execute([sys.executable, "-c", script, *map(str, arguments)], code=2, **options).stderr

    def start(self, *arguments: object, **variables: str) -> subprocess.Popen[str]:
        """`harness` in the background, with these environment variables; Ctrl-C reaches it.

        A job that a shell script started in the background inherits an ignored SIGINT: that is undone here.
        """
        undo = (
            "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
        )
        command = [sys.executable, "-c", undo, *self.command(*arguments)]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=self.environment | variables, **pipes)

    def records(self) -> list[RunRecord]:
        return list(Store(self.out).records())

    def by_name(self) -> dict[str, RunRecord]:
        return {record.spec.name: record for record in self.records()}

    def ends(self, more: str, **changes: object) -> dict[str, RunRecord]:
        """Runs `ENDS` and more cells, all of which must end as they expect; the records by cell."""
        self.run(self.suite(ENDS + more, repeats=1, **changes))
        found = self.by_name()
        assert {n: (r.status, r.reason) for n, r in found.items() if r.status != r.spec.expect} == {}
        assert "SIGKILL" in found["killed"].reason
        assert "exited with" in found["exits"].reason
        assert "Error" in found["exception"].reason
        assert "its limit of" in found["eats"].reason
        assert found["eats"].memory.limit_bytes == found["eats"].memory.idle_bytes + (100 << 20)
        for record in found.values():
            assert str(self.folder) not in json.dumps(to_json(record)), "records name no folder of this machine"
        return found


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def browser():
    """Chromium. Where there is none CI fails, and everyone else is told."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no Chromium here: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def cli(tmp_path):
    return Cli(tmp_path)


@pytest.fixture
def kernels(cli):
    """Compiled once for all tests, and found in the cache of `cli`."""
    from tests.offload import with_kernels  # not for tests without torch

    with_kernels(cli.folder / "cache")


@pytest.fixture(scope="session", autouse=True)
def forks():
    """Ended with the tests, so that what measures them sees it too."""
    yield
    FORKS.close()


@pytest.fixture(scope="session")
def smollm2(gguf_file, tmp_path_factory):
    """The model of that file, in float32."""
    return checkpoints.prepare(ModelSpec(str(gguf_file), dtype="float32"), tmp_path_factory.mktemp("smollm2"))
