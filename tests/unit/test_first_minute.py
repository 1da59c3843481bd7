"""What a new user meets first: `harness` alone, doctor's last lines, a first suite, completion, explanations."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from harness import registry
from harness.cli.doctor import _told
from harness.cli.main import cli
from harness.suite.config import load_suite
from harness.suite.first import first_suite, write_new


def run(*arguments, code=0):
    done = CliRunner().invoke(cli, list(map(str, arguments)))
    assert done.exit_code == code, done.output
    return done.output


def test_harness_alone_names_commands_that_there_are():
    told = run()
    for line in told.splitlines():
        if line.startswith("  harness "):
            assert line.split()[1] in cli.list_commands(None), line


def test_doctor_ends_with_what_runs_and_what_mends_the_rest():
    rows = [
        {"check": "engine a", "state": "ok", "detail": "good", "mend": ""},
        {"check": "engine b", "state": "limited", "detail": "missing b", "mend": "pip install b"},
        {"check": "energy", "state": "limited", "detail": "no counter", "mend": ""},
    ]
    first, *rest = _told(rows)
    assert first.startswith("you can run: a; ")
    assert rest == ["not: engine b, because missing b -> pip install b"]


@pytest.mark.parametrize("model", [*registry.shapes().CATALOGUE, "package:some_model", "some/hub-id", '{"odd: name'])
def test_a_first_suite_is_valid(model, tmp_path):
    (tmp_path / "s.yaml").write_text(first_suite(model, None, "odd name!"))
    suite = load_suite(tmp_path / "s.yaml")
    assert suite.name == "odd-name"
    assert {"offload-sweep", "offload-4bit"} <= {cell.name for cell in suite.cells}
    assert all(cell.model.id == model for cell in suite.cells)
    assert {cell.limits.host_memory is None for cell in suite.cells if not cell.reference} == {False}


@pytest.mark.parametrize("name", ["1", "1e5", "0x1F", "null", "true", "2026-01-01", "...", ""])
def test_the_name_of_a_first_suite_stays_text(name, tmp_path):
    (tmp_path / "s.yaml").write_text(first_suite("some/hub-id", None, name))
    assert load_suite(tmp_path / "s.yaml").name == (name.strip(".") or "suite")


def test_a_first_suite_limits_memory_below_the_weights(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "s.yaml").write_text(first_suite(str(folder), None, "s"))
    cell = load_suite(tmp_path / "s.yaml").cells[0]
    assert cell.limits.host_memory == int(0.6 * 1024) << 20
    assert cell.model.weights == "auto"


def test_init_writes_a_suite_once(tmp_path):
    out = tmp_path / "mine.yaml"
    told = run("init", "--model", "facebook/opt-350m", "--out", out, "--memory", "1GiB")
    assert f"harness run {out}" in told
    assert {cell.limits.host_memory for cell in load_suite(out).cells if not cell.reference} == {1 << 30}
    before = out.read_text()
    assert "exists; choose another place" in run("init", "--model", "x", "--out", out, code=2)
    assert "expected a size" in run("init", "--model", "x", "--out", tmp_path / "new.yaml", "--memory", "lots", code=2)
    assert "nothing fits" in run("init", "--model", "x", "--out", tmp_path / "new.yaml", "--memory", "0GiB", code=2)
    assert out.read_text() == before and not (tmp_path / "new.yaml").exists()


def test_a_suite_is_written_whole_or_not_at_all(tmp_path):
    told = run("init", "--model", "caf\udce9", "--out", tmp_path / "s.yaml", code=2)
    assert "is not UTF-8; rename the model" in told and len(told.splitlines()) == 1
    told = run("init", "--model", "a\x1b[31m", "--out", tmp_path / "s.yaml", code=2)
    assert "has control characters; rename the model" in told and len(told.splitlines()) == 1
    with pytest.raises(UnicodeEncodeError):
        write_new(tmp_path / "s.yaml", "a\ud800")
    assert not list(tmp_path.iterdir())


def test_explain_prints_everything_of_a_key():
    told = run("explain", "policy.weight_bits", "timeout")
    for words in (
        "under policy",
        "unit      bits",
        "default   16",
        "heeded by offload",
        "policy: {weight_bits: 4}",
        "30min",
    ):
        assert words in told
    assert "did you mean" in run("explain", "weight_bit", code=2)
    rows = [json.loads(line) for line in run("explain", "--json").splitlines()]
    assert {"policy.threads", "workload.kind", "hardware.requires.disk_free"} <= {row["key"] for row in rows}


def test_schemas_are_json():
    assert json.loads(run("schema", "suites"))["required"] == ["name"]
    assert "fingerprint" in json.loads(run("schema", "records"))["properties"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_ask_harness(shell):
    script = run("completion", shell)
    assert f"_HARNESS_COMPLETE={shell}_complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_commands_are_completed(capsys):
    environment = {"COMP_WORDS": "harness expl", "COMP_CWORD": "1", "_HARNESS_COMPLETE": "bash_complete"}
    done = CliRunner().invoke(cli, [], prog_name="harness", env=os.environ | environment)
    assert done.output.split() == ["plain,explain"]


@pytest.mark.parametrize("words", [{}, {"COMP_WORDS": "harness ru", "COMP_CWORD": "one"}])
def test_what_only_a_shell_may_set_is_refused_in_a_line(words):
    start = "import sys; sys.argv = ['harness']; from harness.cli.main import main; main()"
    environment = os.environ | {"_HARNESS_COMPLETE": "bash_complete"} | words
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "harness: _HARNESS_COMPLETE is for the script of `harness completion`; unset it\n"
