"""`harness compare` and `harness history` as a user and a CI job meet them: exit codes, one clear line, files."""

import json
import sqlite3
from pathlib import Path

import pytest

from tests.records import cell, failed, repeats, write

SPEEDS = (10.1, 9.8, 10.4, 9.9, 10.0, 10.2, 9.7)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Run directories: a base, the same again, slower, failing, too few launches, another machine."""
    write(tmp_path / "base", repeats(cell(), SPEEDS))
    write(tmp_path / "same", repeats(cell(), SPEEDS[::-1]))
    write(tmp_path / "slow", repeats(cell(), [0.9 * v for v in SPEEDS]))
    write(tmp_path / "fails", [failed(cell(), "oom_host", "killed at its limit", i) for i in range(7)])
    write(tmp_path / "few", repeats(cell(), SPEEDS[:2]))
    write(tmp_path / "moved", repeats(cell(), SPEEDS, provenance={"machine": {"cpu": "another"}}))
    return tmp_path


@pytest.mark.parametrize(
    ("heads", "code", "words"),
    [
        ("same", 0, "no change"),
        ("same slow", 1, "10.0% slower"),  # as bad as the worst
        ("slow", 1, "10.0% slower"),
        ("fails", 1, "7 of 7 launches newly fail, oom_host: killed at its limit"),
        ("few", 5, "cannot give p < 0.02"),
        ("moved", 5, "machine.cpu"),
    ],
)
def test_exit_codes(runs, cli, heads, code, words):
    assert words in cli("compare", runs / "base", *(runs / head for head in heads.split()), code=code).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["base"], "name BASE and at least one HEAD"),
        (["base", "nothing"], "has no records.jsonl"),
        (["base", "same", "--metric", "beauty"], "no speed or time is named 'beauty'"),
        (["base", "same", "--alpha", "nan"], "not between 0 and 1"),
        (["base", "--against", "llama"], "named 'llama'"),
        (["base", "same", "--against", "accelerate", "--allow", "packages"], "go with BASE and HEAD"),
        (["base", "same", "--out", "."], "it is a folder"),
        (["base", "same", "--format", "pdf"], "Invalid value"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(runs, cli, arguments, words):
    named = [str(runs / a) if (runs / a).exists() or a == "nothing" else a for a in arguments]
    assert words in cli("compare", *named, code=2).stderr


def test_a_file_holds_what_would_have_been_printed(runs, cli):
    out = runs / "deep" / "comparison.json"
    found = cli("compare", runs / "base", runs / "slow", "--format", "json", "--out", out, code=1)
    assert found.stdout == "" and "regression" in found.stderr
    assert json.loads(out.read_text())[0]["cells"][0]["verdict"] == "regression"


def test_engines_of_one_run(runs, cli):
    records = [*repeats(cell(), SPEEDS), *repeats(cell("ours", "offload", seed=1), [3 * v for v in SPEEDS])]
    write(runs / "engines", records)
    assert "3.000" in cli("compare", runs / "engines", "--against", "accelerate").stdout


def test_history_over_several_nights(runs, cli):
    """The same launch number of two nights is two launches."""
    url = f"sqlite:///{runs}/deep/history.db"
    shown = cli("history", "show", "--db", url, code=2)
    assert "no history in" in shown.stderr and not (runs / "deep").exists()
    write(runs / "second", repeats(cell(), SPEEDS, wall_s=61.0))
    assert "14 added, 0 already there" in cli("history", "add", runs / "base", runs / "second", "--db", url).stdout
    with sqlite3.connect(runs / "deep" / "history.db") as connection:
        assert connection.execute("select count(*) from offload_harness_records").fetchone() == (14,)
    assert "7 already there" in cli("history", "add", runs / "base", "--db", url).stdout
    trend = cli("history", "trend", "--db", url, "--json")
    assert json.loads(trend.stdout)["changes"] == []
    assert "at least 6 are needed" in cli("history", "trend", "--db", url).stdout
    assert "nothing is recorded" in cli("history", "show", "--db", url, "--cell", "none").stderr
    cli("report", runs / "base", "--history", url)


def test_a_run_without_a_report(cli):
    run = cli.run(cli.suite(repeats=1), "--no-report")
    assert not (cli.out / "report.html").exists() and "records:" in run.stderr
