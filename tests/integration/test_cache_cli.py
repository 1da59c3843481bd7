"""`harness cache` as a user meets it."""

import json
import signal
import subprocess

import pytest

from tests.integration.conftest import end, wait_for


@pytest.fixture
def cache(cli):
    """A cache with a kernel of 1000 bytes, a leftover, and a file of somebody else's."""
    cache = cli.folder / "cache"
    (cache / "kernels" / "panels-0123").mkdir(parents=True)
    (cache / "kernels" / "panels-0123.lock").touch()
    (cache / "kernels" / "panels-0123" / "kernel.so").write_bytes(b"x" * 1000)
    (cache / "harness-job-1").mkdir()
    (cache / "mine.txt").write_text("mine")
    return cache


def test_what_is_there_is_listed(cli, cache):
    text = cli("cache", "ls").stdout
    assert "panels-0123" in text and "leftover" in text and "3 entries" in text
    listed = json.loads(cli("cache", "ls", "--json").stdout)
    assert listed["total"] == sum(entry["size"] for entry in listed["entries"]) == 1004
    assert listed["free"] > 0 and listed["folder"] == str(cache)
    assert "0 entries" in cli("cache", "ls", "--cache-dir", cli.folder / "none").stdout


def test_nothing_goes_without_a_yes(cli, cache):
    before = sorted(cache.rglob("*"))
    assert "would be removed" in cli("cache", "clean", "--all", "--dry-run").stdout
    for given in ({"stdin": subprocess.DEVNULL}, {"input": "y\n"}):
        assert "give --yes" in cli("cache", "clean", "--all", code=2, **given).stderr
    assert sorted(cache.rglob("*")) == before
    cli("cache", "clean", "--yes")
    assert not (cache / "harness-job-1").exists() and (cache / "kernels" / "panels-0123").exists()
    assert "1000 B freed" in cli("cache", "clean", "--kernels", "--yes").stdout
    assert "nothing to remove" in cli("cache", "clean", "--all", "--yes").stderr
    assert (cache / "mine.txt").read_text() == "mine"


def test_wrong_choices_are_one_line(cli, cache):
    assert "did you mean" in cli.refused("cache", "clean", "kernels/panels-012")
    assert "not made by the harness" in cli.refused("cache", "clean", "mine.txt")
    assert "a duration such as" in cli.refused("cache", "clean", "--unused-for", "long")
    assert "not both" in cli("cache", "clean", "mine.txt", "--all", code=2).stderr


def test_damage_is_named_with_the_command_that_removes_it(cli, cache):
    assert "0 damaged" in cli("cache", "verify").stderr
    (cache / "kernels" / "panels-0123" / "kernel.so").write_bytes(b"")
    told = cli("cache", "verify", code=1).stdout
    command = told.strip().rpartition("to remove it: harness ")[2].split()
    assert json.loads(cli("cache", "verify", "--json", code=1).stdout)["name"] == "kernels/panels-0123"
    cli(*command, "--yes")
    cli("cache", "verify")


def test_a_run_keeps_its_cache(cli, cache):
    process = cli.start(*cli.running(cli.suite("  - {name: hangs, engine: fake, options: {hang: true}}", repeats=1)))
    try:
        wait_for(lambda: list((cache / "work").glob("*/*")))
        assert "nothing to remove" in cli("cache", "clean", "--yes").stderr
        assert "in use by a run" in cli.refused("cache", "clean", "kernels/panels-0123", "--yes").splitlines()[-1]
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)
    finally:
        end(process)
    cli("cache", "clean", "kernels/panels-0123", "--yes")
