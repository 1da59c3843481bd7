"""The kit for continuous integration: the order of launches, what the files refer to, and the suite itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness.suite.config import load_suite

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "ci" / "interleave.sh"
ACTION, WORKFLOW = ".github/actions/compare/action.yml", ".github/workflows/compare.yml"


@pytest.fixture
def commands(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two commands that note how they were called, and where they note it."""
    log = tmp_path / "log"
    for name in ("base", "head"):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\nexit ${{STATUS:-0}}\n')
        path.chmod(0o755)
    return tmp_path / "base", tmp_path / "head", log


def interleave(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    environment["PATH"] = "/usr/bin:/bin"
    return subprocess.run([SCRIPT, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False)


def test_sides_take_turns_in_being_first(commands):
    base, head, log = commands
    assert interleave(base, head, "a suite.yaml", 3, "out", "--set", "seed=1").returncode == 0
    calls = log.read_text().splitlines()
    assert [c.split()[0] for c in calls] == ["base", "head", "head", "base", "base", "head"]
    assert calls[2] == "head run a suite.yaml --set repeats=2 --no-report --out out/head --set seed=1"


@pytest.mark.parametrize(("status", "ends", "calls"), [(1, 0, 4), (2, 2, 1), (130, 130, 1)])
def test_a_failed_cell_is_for_the_comparison_and_anything_else_ends_it(commands, status, ends, calls):
    base, head, log = commands
    assert interleave(base, head, "s", 2, "out", STATUS=str(status)).returncode == ends
    assert len(log.read_text().splitlines()) == calls


def test_too_few_arguments_are_told():
    found = interleave("base", "head")
    assert found.returncode == 2 and "ci/interleave.sh BASE_HARNESS HEAD_HARNESS" in found.stderr


def test_the_workflow_hands_over_what_the_action_takes():
    used, text = ((ROOT / name).read_text() for name in (ACTION, WORKFLOW))
    action, workflow = yaml.safe_load(used), yaml.safe_load(text)
    step = workflow["jobs"]["compare"]["steps"][-1]
    assert set(step["with"]) <= set(action["inputs"])
    asked = workflow[True]["workflow_call"]["inputs"]  # YAML 1.1 takes `on` for a truth
    assert set(re.findall(r"inputs\.(\w+)", text)) == set(asked)
    assert set(re.findall(r"inputs\.(\w+)", used)) == set(action["inputs"])


@pytest.mark.parametrize("name", [ACTION, WORKFLOW, "ci/gitlab-example.yml"])
def test_scripts_in_files_are_scripts(name):
    """And take nothing of a pull request's own words into a shell."""
    content = yaml.safe_load((ROOT / name).read_text())
    steps = content.get("runs", {}).get("steps", [])
    scripts = [s["run"] for s in steps if "run" in s]
    if "compare-speed" in content:
        scripts = ["\n".join(content["compare-speed"][part]) for part in ("before_script", "script")]
    for script in scripts:
        assert "${{" not in script
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_the_suite_is_small_and_measures_us():
    suite = load_suite(ROOT / "suites" / "ci_smoke.yaml")
    assert sum(c.repeats for c in suite.cells) <= 8
    assert any(c.engine == "offload" and c.limits.host_memory for c in suite.cells)


def test_gpu_check_says_that_there_is_no_device(tmp_path):
    """And leaves nothing."""
    script = ROOT / "ci" / "gpu_check.sh"
    folder = tmp_path / "out"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    done = subprocess.run([script, "-o", folder], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "no CUDA device" in done.stderr
    assert not folder.exists()


def test_gpu_check_runs_every_cell_of_the_device_suites():
    """In parts; of the small suite all at once."""
    text = (ROOT / "ci" / "gpu_check.sh").read_text()
    suite = load_suite(ROOT / "suites" / "gpu_16g.yaml")
    each = " ".join(re.findall(r"^ *(?:\w+\) )?each (.*)", text, re.MULTILINE)).split()
    assert {cell.name for cell in suite.cells} <= set(each)
    assert all(cell.timeout_s < 480 for cell in suite.cells)
