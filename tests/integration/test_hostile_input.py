"""Strings of somebody else, and secrets of the user, through the real command line."""

import re
from pathlib import Path

import pytest

from tests.records import cell, failed, record, write

ATTACK = "::error::a\r::warning::b \x1b[31m \x1b]8;;http://e\x07 ##[error]c \u202e \x9b2J [/x] '; drop table x; -- @all"
#: What a terminal or a CI server would obey in the output of a command.
OBEYED = re.compile("^[ \t]*::|##[a-z]*\\[|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e]", re.MULTILINE)


@pytest.fixture
def run(cli) -> Path:
    spec = cell(ATTACK, suite=ATTACK, engine=ATTACK)
    records = [*(record(spec, i) for i in range(2)), failed(spec, "error", ATTACK, 2, log=ATTACK)]
    return write(cli.folder / "run", records)


def told(cli, *arguments: object, code: int | None = 0) -> str:
    done = cli(*arguments, code=code, text=False)
    text = (done.stdout + done.stderr).decode()
    assert text and not OBEYED.search(text), ascii(text)
    return text


def test_no_command_prints_what_a_terminal_or_a_ci_server_obeys(cli, run):
    url = f"sqlite:///{cli.folder}/h.db"
    told(cli, "report", run)
    told(cli, "compare", run, run, code=None)
    told(cli, "compare", run, "--against", ATTACK, code=2)
    for form in ("md", "json", "junit", "gab"):
        told(cli, "compare", run, run, "--format", form, code=None)
    told(cli, "compare", run, run, "--out", cli.folder / "c.md", code=None)
    told(cli, "history", "add", run, "--db", url)
    for command in ("show", "trend"):
        told(cli, "history", command, "--db", url)
        told(cli, "history", command, "--db", url, "--json")
    told(cli, "history", "show", "--cell", ATTACK.replace("\r", " "), "--db", url)
    told(cli, "report", run, "--history", url)
    told(cli, "run", cli.folder / ATTACK, code=2)
    told(cli, "validate", ATTACK, code=2)
    told(cli, "ls", ATTACK, code=2)


def test_a_password_of_a_database_is_not_printed(cli, run):
    for url in (
        "postgresql://bob:hunter2@localhost:1/x",
        f"sqlite:///{cli.folder}/h.db?password=hunter2",
        "x:hunter2@y",
    ):
        for command in (("history", "add", run, "--db", url), ("history", "show", "--db", url)):
            assert "hunter2" not in told(cli, *command, code=None)
        assert "hunter2" not in told(cli, "report", run, "--history", url, code=None)


def test_a_secret_of_a_cell_is_recorded_nowhere(cli):
    suite = cli.suite("  - {name: a, engine: fake, env: {VLLM_API_KEY: hunter2}}", repeats=1)
    arguments = (suite, "--set", "env.DS_TOKEN=hunter3")
    done = cli.run(*arguments)
    listed = cli.run(*arguments, "--dry-run", "--json")
    again = cli.run(*arguments)
    assert "0 launches to do (1 already done" in again.stderr
    (kept,) = cli.records()
    assert kept.spec.env == {"VLLM_API_KEY": "***", "DS_TOKEN": "***"}
    assert "env.DS_TOKEN=***" in kept.command
    shown = "".join(d.stdout + d.stderr for d in (done, listed, again))
    files = [p for folder in (cli.out, cli.folder / "cache") for p in folder.rglob("*") if p.is_file()]
    assert "hunter" not in shown
    assert [p for p in files if b"hunter" in p.read_bytes()] == []
