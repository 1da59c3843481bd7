"""Engines, launchers and tasks of other distributions: found by entry points, run in suites, refused in one line."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plugin_engine"
GUIDE = ROOT / "docs" / "developer" / "add-an-engine.md"


def install(folder: Path, name: str, entries: str, code: str = "") -> None:
    """Into a folder, as pip's --target does: a module of the same name, and what its distribution declares."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nSummary: of a test\n")
    (about / "entry_points.txt").write_text(textwrap.dedent(entries))
    (folder / f"{name}.py").write_text(textwrap.dedent(code))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path of the commands that a test runs."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path / 'site'}")
    return tmp_path / "site"


def test_the_guide_shows_the_example_as_it_is():
    shown = re.findall(r"<!-- file: (\S+) -->\n```\w*\n(.*?)```\n", GUIDE.read_text(), re.DOTALL)
    assert {name for name, _ in shown} == {
        f"examples/plugin_engine/{name}"
        for name in ("echo_engine/__init__.py", "echo_engine/pins.txt", "pyproject.toml", "suite.yaml")
    }
    for name, text in shown:
        assert text == (ROOT / name).read_text(), name


def test_an_engine_from_another_folder_runs_in_a_suite(cli, site, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    copy = shutil.copytree(EXAMPLE, tmp_path / "source")  # a build leaves files beside the sources
    subprocess.run([*command, "--target", str(site), str(copy)], check=True)
    cli.run(EXAMPLE / "suite.yaml")
    (record,) = cli.records()
    assert (record.status, record.spec.engine) == ("ok", "echo")
    assert record.metrics["generated_tokens"] == 16 and record.load.block_size == 2
    assert record.provenance["packages"] == {"echo-engine": "1.0"}
    (row,) = (line for line in cli("ls", "engines").stdout.splitlines() if line.startswith("echo "))
    assert "ready" in row and "buildable" in row and "plug-in of echo-engine 1.0" in row
    pins = "from harness import registry; print(registry.environment_pins('echo'))"
    found = subprocess.run([sys.executable, "-c", pins], capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()) == site / "echo_engine" / "pins.txt"


TASK = """
    from harness.api import GenerationRequest, SamplingParams
    from harness.api.task import Judged, Questions


    class Lengths:
        name, protocol = "lengths", "letters of an answer"

        def questions(self, given, report):
            prompts = [given.tokens.encode(text) for text in ("ab", "abc")]
            sampling = SamplingParams(max_tokens=3, ignore_eos=True)
            asked = tuple(GenerationRequest(f"r{i}", p, sampling) for i, p in enumerate(prompts))
            return Questions(prompts=asked, examples=len(asked))

        def judge(self, given, answers):
            return Judged({"mean_length": sum(map(len, answers.texts)) / len(answers.texts)})
"""


def test_a_task_of_another_distribution_is_asked_and_judged(cli, site):
    install(site, "lengths_task", "[offload_harness.tasks]\nlengths = lengths_task:Lengths\n", TASK)
    cli.run(cli.suite(repeats=1, workload="{kind: task, task: lengths}"))
    (record,) = cli.records()
    assert record.accuracy.task == "lengths" and record.accuracy.examples == 2
    assert record.accuracy.figures["mean_length"] > 0


LAUNCHER = """
    from harness.launchers.process import ProcessSandbox


    class Sandbox(ProcessSandbox):
        def identity(self):
            return {"environment": "of another kind"}


    class Launcher:
        def __init__(self, cache):
            pass

        def sandbox(self, spec, exchange):
            return Sandbox()
"""


def test_a_launcher_of_another_distribution_runs_cells(cli, site):
    install(site, "kind", "[offload_harness.launchers]\nother = kind:Launcher\n", LAUNCHER)
    done = cli.run(cli.suite("  - {engine: fake}", repeats=1), "--launcher", "other")
    (record,) = cli.records()
    assert record.spec.launcher == "other" and record.provenance["environment"] == "of another kind"
    done = cli.run(cli.suite(repeats=1), "--launcher", "othre", code=2)
    assert "unknown launcher 'othre'; did you mean 'other'?" in done.stderr


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [
        ("broken:Engine", "import nothing_of_this_name", "cannot be imported: ModuleNotFoundError: No module named"),
        ("broken:Missing", "", "cannot be imported: AttributeError"),
        ("broken:Engine", "class Engine:\n    def load(self): ...", "is no Engine: broken:Engine lacks capabilities"),
        ("broken:Engine", "Engine = 3", "is no class"),
    ],
)
def test_an_engine_that_is_none_is_told_in_one_line(site, target, code, words):
    install(site, "broken", f"[offload_harness.engines]\nbad = {target}\n", code)
    script = (
        "from harness import registry; from harness.api import HarnessError\n"
        "try: registry.make_engine('bad', {})\n"
        "except HarnessError as exc: print(exc)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert "bad" in line and words in line


@pytest.mark.parametrize(
    ("kind", "target", "cell"),
    [
        ("engines", "fake", "engine: fake"),
        ("tasks", "di_buy", "engine: fake, workload: {kind: task, task: di_buy}"),
        ("launchers", "process", "engine: fake, launcher: process"),
    ],
)
def test_a_name_of_ours_is_not_taken(cli, site, kind, target, cell):
    install(site, "thief", f"[offload_harness.{kind}]\n{target} = thief:X\n")
    changes = {"workload": "{}"} if kind == "tasks" else {}
    done = cli.run(cli.suite(f"  - {{{cell}}}", repeats=1, **changes), code=2)
    (line,) = (line for line in done.stderr.splitlines() if "plug-in" in line)
    assert f"plug-in '{target}' of thief 1.0 has the name of one of the harness itself: uninstall one of them" in line


def test_two_plug_ins_of_one_name_are_refused(cli, site):
    for name in ("first", "second"):
        install(site, name, f"[offload_harness.engines]\nshared = {name}:Engine\n")
    done = cli("validate", cli.suite("  - {engine: shared}"), code=2)
    assert "plug-in 'shared' of first 1.0 has the name of one of second 1.0: uninstall one of them" in done.stderr
