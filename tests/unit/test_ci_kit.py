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
GITHUB = [str(path.relative_to(ROOT)) for path in sorted((ROOT / ".github").rglob("*.yml"))]


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


@pytest.mark.parametrize("name", [*GITHUB, "ci/gitlab-example.yml"])
def test_scripts_in_files_are_scripts(name):
    """And take nothing of a pull request's own words into a shell."""
    content = yaml.safe_load((ROOT / name).read_text())
    steps = content.get("runs", {}).get("steps", [])
    steps = steps + [step for job in content.get("jobs", {}).values() for step in job["steps"]]
    scripts = [s["run"] for s in steps if "run" in s]
    assert not any("${{" in s.get("with", {}).get("script", "") for s in steps)
    if "compare-speed" in content:
        scripts = ["\n".join(content["compare-speed"][part]) for part in ("before_script", "script")]
    for script in scripts:
        assert "${{" not in script
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize("name", GITHUB)
def test_actions_are_pinned_and_workflows_may_do_little(name):
    """By commit, with the version beside it. Who may write runs no code of a pull request."""
    text = (ROOT / name).read_text()
    for used, version in re.findall(r"^\s*(?:- )?uses: (\S+)(.*)$", text, re.MULTILINE):
        assert used.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", used + version), used
    content = yaml.safe_load(text)
    assert "pull_request_target" not in text
    for job in content.get("jobs", {}).values():
        assert content["permissions"] == {"contents": "read"}
        for step in job["steps"]:
            checks_out = step.get("uses", "").startswith("actions/checkout@")
            assert not checks_out or step["with"]["persist-credentials"] is False
        if "write" in job.get("permissions", {}).values():
            assert not any("run" in step or step.get("with", {}).get("path") == "head" for step in job["steps"])
            if "pull_request" in content[True]:  # YAML 1.1 takes `on` for a truth
                (own,) = (step["uses"] for step in job["steps"] if step["uses"].startswith("./"))
                assert "kit" in own and "github.base_ref" in str(job["steps"][0]["with"]["ref"])


@pytest.mark.parametrize(
    ("vulnerable", "skipped", "code"),
    [("none", 0, 0), ("engines/environments/b.txt", 0, 2), ("none", 1, 0), ("none", 2, 2)],
)
def test_an_audit_reads_every_list_of_pins_and_leaves_bills_of_materials(tmp_path, vulnerable, skipped, code):
    """Where the service knows no pin of a list, nothing was audited, whatever the tool says: that is no success."""
    environments = tmp_path / "engines" / "environments"
    environments.mkdir(parents=True)
    for path in (tmp_path / "constraints.txt", environments / "a.txt", environments / "b.txt"):
        path.write_text("click==8.1\nrich==14\n")
    tool = tmp_path / "pip-audit"
    tool.write_text(
        f'#!/bin/sh\necho "$@" >> calls\nseq {skipped} | sed "s,$, could not be audited,"\n'
        'case "$*" in *--output*) for last; do :; done; echo {} > "$last";; esac\n'
        f'case "$*" in *{vulnerable}*) exit 1;; esac\n'
    )
    tool.chmod(0o755)
    command = ["make", "-f", ROOT / "Makefile", "audit", f"PIP_AUDIT={tool}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("nothing was audited" in done.stderr) is (skipped == 2)
    asked = {line.split()[1] for line in (tmp_path / "calls").read_text().splitlines()}
    assert asked == {"constraints.txt", "engines/environments/a.txt", "engines/environments/b.txt"}
    assert {path.name for path in (tmp_path / "build" / "sbom").iterdir()} == {"constraints.json", "a.json", "b.json"}


def test_an_audit_without_its_tool_says_what_to_install(tmp_path):
    command = ["make", "-f", ROOT / "Makefile", "audit", "PIP_AUDIT=no-such-tool"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "pip install pip-audit" in done.stderr


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


KIT = ROOT / "examples" / "ci_kit"


def test_another_projects_kit_measures_in_turns_and_names_its_own_commits(tmp_path):
    log = tmp_path / "log"
    for side in ("base", "head"):
        command = tmp_path / side / "bin" / "harness"
        command.parent.mkdir(parents=True)
        command.write_text(f'#!/bin/sh\necho {side} "$@" >> {log}\n[ "$1" != compare ] || exit 5\n')
        command.chmod(0o755)
    words = ["mine", tmp_path / "base", "v1", tmp_path / "head", "v2", "suite.yaml", "1"]
    found = subprocess.run([KIT / "compare.sh", *map(str, words)], cwd=tmp_path, capture_output=True, check=False)
    assert found.returncode == 5, "the verdict of the comparison is the script's"
    out = "results/compare"
    assert log.read_text().splitlines() == [
        f"base run suite.yaml --set repeats=1 --no-report --out {out}/base",
        f"head run suite.yaml --set repeats=1 --no-report --out {out}/head",
        f"head history add {out}/base --subject mine@v1",
        f"head history add {out}/head --subject mine@v2",
        f"head report {out}/base {out}/head --side-by-side --out {out}/report.html",
        f"head compare {out}/base {out}/head --allow packages.mine",
    ]


def test_the_kits_workflow_calls_the_script_as_it_is_called():
    workflow = yaml.safe_load((KIT / "github.yml").read_text())
    steps = workflow["jobs"]["compare"]["steps"]
    (call,) = [line for step in steps for line in step.get("run", "").splitlines() if "compare.sh" in line]
    usage = next(line for line in (KIT / "compare.sh").read_text().splitlines() if "#   compare.sh" in line)
    required = [word for word in usage.split()[2:] if not word.startswith("[")]
    assert len(call.split("||")[0].split()[1:]) == len(required)
    bare = subprocess.run([KIT / "compare.sh"], capture_output=True, text=True, check=False)
    assert bare.returncode == 2 and usage.strip("# ") in bare.stderr
