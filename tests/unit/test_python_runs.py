"""Runs and comparisons from Python: the command line's records, as frames and as HTML."""

from pathlib import Path

import pytest

from harness.api import HarnessError
from offload_harness import compare, read_run, run_suite
from reports.flat import rows
from tests.records import demo

pd = pytest.importorskip("pandas")
ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "docs" / "results" / "cpu_offload-2026-11-23"
SUITE = """
name: tiny
model: {id: fake}
workload: {kind: synthetic, prompt_len: 8, gen_len: 4}
machine_probe: false
warmup: 0
matrix:
  - {name: fine, engine: fake}
  - {name: "odd", engine: fake, options: {crash: unsupported}}
"""


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(SUITE)
    return path


@pytest.fixture(scope="module")
def committed():
    return read_run(COMMITTED)


def test_a_suite_runs_and_its_launches_are_rows(suite, tmp_path):
    places = {"out": tmp_path / "out", "cache_dir": tmp_path / "cache", "progress": False}
    run = run_suite(suite, set={"repeats": 1, "workload.gen_len": 3}, extra_tries=0, **places)
    frame = run.frame.set_index("name")
    assert dict(frame["status"]) == {"fine": "ok", "odd": "unsupported"}
    assert frame.loc["fine", "gen_len"] == 3 and frame.loc["fine", "generated_tokens"] > 0
    assert pd.isna(frame.loc["odd", "total_s"])
    assert [r.spec.name for r in run.failed] == ["odd"]
    assert (tmp_path / "out" / "report.html").exists()
    assert read_run(tmp_path / "out").frame.equals(run.frame)
    again = run_suite(suite, set={"repeats": 1, "workload.gen_len": 3}, cells=["fine"], report=False, **places)
    assert [r.started_at for r in again.records] == [run.records[0].started_at], "it goes on where it stopped"


def test_a_suite_is_predicted(suite, tmp_path):
    suite.write_text(SUITE.replace("- {name: fine, engine: fake}", "- {name: own, engine: offload}").replace(
        "{id: fake}", "{id: facebook/opt-1.3b, weights: dummy}").partition("  - {name: \"odd\"")[0])  # fmt: skip
    run = run_suite(suite, simulate=True, hardware="t4_gcp", out=tmp_path / "out", cache_dir=tmp_path / "cache",
                    progress=False)  # fmt: skip
    assert list(run.frame["simulated"]) == [True]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"suite": "no_such_suite"}, "no suite file or shipped suite"),
        ({"cells": ["nobody"]}, "no cell 'nobody'"),
        ({"set": {"repeat": 1}}, "did you mean 'repeats'"),
        ({"set": {"repeats": "many"}}, "--set repeats"),
        ({"data_dir": "/no/such"}, "/no/such"),
        ({"set": {"seed": {1}}}, "set: seed: expected what a suite can hold"),
        ({"out": "a\0b"}, "no file has such a name"),
    ],
)
def test_a_mistake_is_one_line(suite, tmp_path, given, told):
    with pytest.raises(HarnessError, match=told) as error:
        run_suite(**{"suite": suite, "out": tmp_path / "out", "cache_dir": tmp_path, "progress": False} | given)
    assert "\n" not in str(error.value)


def test_a_machine_that_is_too_small_is_refused(suite, tmp_path):
    suite.write_text(SUITE + "hardware: {requires: {host_memory: 500TiB}}\n")
    with pytest.raises(HarnessError, match="this machine does not meet tiny: host memory"):
        run_suite(suite, out=tmp_path / "out", cache_dir=tmp_path, progress=False)


def test_every_column_is_documented_and_has_its_unit_in_its_name():
    page = (ROOT / "docs" / "reference" / "records.md").read_text().partition("## Columns")[2]
    for column in rows(demo())[0]:
        assert f"`{column}`" in page, column


def test_a_notebook_shows_the_summary(committed):
    shown = committed._repr_html_()
    assert "offload-sweep" in shown and "<script" not in shown and shown.count("<table>") >= 1
    assert "offload-sweep" in str(committed)


def test_engines_of_a_run_are_compared(committed):
    compared = compare(committed, against="accelerate")
    frame = compared.frame.set_index("name")
    assert frame.loc["offload-sweep", "ratio"] > 1
    assert set(frame["verdict"]) <= {"ahead", "behind", "inconclusive", "not comparable", "as expected", "no change"}
    assert compared.verdict in set(frame["verdict"])
    assert "offload-sweep" in compared._repr_html_() and "offload-sweep" in str(compared)


def test_two_runs_are_compared(committed):
    compared = compare(COMMITTED, committed)
    assert len(compared.comparisons) == 1
    assert set(compared.frame["ratio"].dropna()) == {1.0}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "second run"),
        ({"head": COMMITTED, "against": "accelerate"}, "second run"),
        ({"head": "/no/such"}, "/no/such"),
        ({"head": "a\0b"}, "no file has such a name"),
        ({"head": COMMITTED, "metric": "speed"}, "speed"),
        ({"head": COMMITTED, "alpha": 2}, "alpha is 2"),
        ({"against": "nobody"}, "nobody"),
        ({"against": "accelerate", "allow": ["packages"]}, "go with two runs"),
    ],
)
def test_a_comparison_that_cannot_be_is_one_line(given, told):
    with pytest.raises(HarnessError, match=told) as error:
        compare(COMMITTED, **given)
    assert "\n" not in str(error.value)
