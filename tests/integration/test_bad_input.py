"""What a user can get wrong on the command line: one clear line, the documented exit code, no traceback."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

GOOD = "  - {name: a, engine: fake}"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["run", "nowhere"], 2, "no suite file or shipped suite 'nowhere'"),
        (["validate", "nowhere.yaml"], 2, "nowhere.yaml"),
        (["report", "nowhere"], 2, "nowhere"),
        (["run"], 2, "Missing argument"),
        (["rum"], 2, "rum"),
        (["ls", "colours"], 2, "colours"),
    ],
)
def test_bad_usage(cli, arguments, code, words):
    done = cli(*arguments)
    assert done.returncode == code
    assert words in done.stderr


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--engine", "fakes"], "no engine 'fakes'"),
        (["--cell", "b"], "no cell 'b'"),
        (["--shard", "0/2"], "--shard 0/2"),
        (["--shard", "x"], "--shard x"),
        (["--set", "polici.schedule=row"], "polici"),
        (["--set", "repeats"], "repeats"),
        (["--json"], "--json goes with --dry-run"),
    ],
)
def test_bad_options_name_what_there_is(cli, option, words):
    done = cli.run(cli.suite(GOOD), *option)
    assert done.returncode == 2
    assert words in done.stderr
    assert not cli.out.exists()


def test_unknown_engine_names_file_line_and_neighbour(cli):
    done = cli("validate", cli.suite("  - {name: a, engine: fakke}"))
    assert done.returncode == 2
    assert "tiny.yaml:9:" in done.stderr
    assert "did you mean 'fake'" in done.stderr


def test_a_limit_that_nothing_would_keep_is_refused(cli):
    done = cli.run(cli.suite("  - {name: a, engine: fake, limits: {device_memory: 1GiB}}", repeats=1))
    assert done.returncode == 1
    assert "unsupported" in done.stdout
    assert "limits.device_memory" in done.stdout + done.stderr


def test_overrides_that_make_cells_alike_are_told_how_to_choose(cli):
    suite = cli.suite("  - {name: a, engine: fake, seed: 1}\n  - {name: b, engine: fake}", repeats=1)
    done = cli.run(suite, "--set", "seed=7")
    assert done.returncode == 2
    assert "'a' and 'b' measure the same" in done.stderr
    assert cli.run(suite, "--set", "seed=7", "--cell", "a").returncode == 0


def test_output_that_cannot_be_written(cli):
    (cli.folder / "file").write_text("")
    done = cli("run", cli.suite(GOOD), "--out", cli.folder / "file" / "out")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "--out" in done.stderr


def test_a_machine_that_is_too_small_is_told_what_it_lacks(cli):
    suite = cli.suite(GOOD, hardware="{requires: {host_memory: 900TiB, device_memory: 10TiB}}")
    done = cli.run(suite)
    assert done.returncode == 3
    assert "host memory: 921600.0 GiB required" in done.stderr
    assert "device memory" in done.stderr


def test_two_harnesses_on_one_directory(cli):
    import fcntl

    cli.out.mkdir()
    with (cli.out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = cli.run(cli.suite(GOOD))
    assert done.returncode == 2
    assert "in use by another harness" in done.stderr


def test_a_newer_record_is_refused_before_anything_runs(cli):
    cli.out.mkdir()
    (cli.out / "records.jsonl").write_text(json.dumps({"schema_version": 99}) + "\n")
    done = cli.run(cli.suite(GOOD))
    assert done.returncode == 2
    assert "schema_version 99 is newer" in done.stderr


def test_a_folder_named_like_our_packages_does_not_shadow_them(cli):
    (cli.folder / "engines").mkdir()
    (cli.folder / "engines" / "__init__.py").write_text("raise SystemExit('shadowed')")
    done = cli.run(cli.suite(GOOD, repeats=1))
    assert done.returncode == 0, done.stderr


def test_closed_stdout_is_no_error(cli):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        import subprocess

        done = subprocess.run(
            cli.command("ls", "engines"), stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert "Traceback" not in done.stderr


def test_nobody_reading_changes_no_exit_code(cli):
    (cli.folder / "bad.yaml").write_text("name: [")
    for arguments in (("validate", "bad.yaml"), ("validate", "bad.yaml", "--json")):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as closed:
            done = subprocess.run(cli.command(*arguments), stdout=closed, stderr=closed, check=False, cwd=cli.folder)
        assert done.returncode == 2


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "loop"])
def test_an_out_that_is_no_file_stays_what_it_is(cli, kind):
    odd = cli.folder / "odd"
    make = {
        "folder": odd.mkdir,
        "fifo": lambda: os.mkfifo(odd),
        "device": lambda: odd.symlink_to("/dev/null"),
        "loop": lambda: odd.symlink_to("odd"),
    }
    make[kind]()
    assert cli.run(cli.suite(GOOD, repeats=1)).returncode == 0
    before = odd.lstat().st_mode
    for arguments in (("report", cli.out, "--out", odd / "x.html"), ("compare", cli.out, cli.out, "--out", odd)):
        done = cli(*arguments)
        if kind == "folder" and arguments[0] == "report":
            continue
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert odd.lstat().st_mode == before


def test_an_out_that_is_a_link_stays_one(cli):
    (cli.folder / "link").symlink_to("kept.md")
    (cli.folder / "kept.md").write_text("old")
    assert cli.run(cli.suite(GOOD, repeats=1)).returncode == 0
    cli("compare", cli.out, cli.out, "--out", cli.folder / "link")
    assert (cli.folder / "link").is_symlink() and "no change" in (cli.folder / "kept.md").read_text()


def test_circles_of_links_and_folders_that_are_gone(cli):
    suite = cli.suite(GOOD, repeats=1)
    (cli.folder / "circle").symlink_to("circle")
    found = cli("run", suite, "--out", cli.folder / "circle" / "x")
    assert found.returncode == 2 and len(found.stderr.splitlines()) == 1, found.stderr
    gone = cli.folder / "gone"
    gone.mkdir()
    command = ["sh", "-c", 'rmdir "$0" && exec "$@"', str(gone), *cli.command("run", suite)]
    done = subprocess.run(command, cwd=gone, capture_output=True, text=True, check=False, env=cli.environment)
    assert (done.returncode, "is gone; cd elsewhere" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "cp437", "ascii"])
def test_terminals_that_do_not_know_every_sign(cli, encoding):
    suite = cli.suite(GOOD, repeats=1)
    for arguments in (("run", suite, "--out", cli.out), ("compare", cli.out, cli.out, "--format", "md")):
        environment = cli.environment | {"PYTHONIOENCODING": encoding}
        done = subprocess.run(cli.command(*arguments), capture_output=True, check=False, env=environment)
        assert b"Traceback" not in done.stderr and done.returncode in (0, 5)


def test_closed_or_full_stderr_stops_no_run(cli):
    suite = cli.suite(GOOD, repeats=1)
    for way in ("2>&-", "2>/dev/full"):
        line = f"exec {shlex.join(cli.command('run', suite, '--fresh', '--out', cli.out))} {way}"
        done = subprocess.run(["sh", "-c", line], env=cli.environment, cwd=cli.folder, check=False, capture_output=True)
        assert done.returncode == 0


def test_histories_that_keep_nothing_or_are_not_there(cli):
    assert cli.run(cli.suite(GOOD, repeats=1)).returncode == 0
    for url in ("sqlite://", "sqlite:///", "sqlite:///:memory:"):
        done = cli("history", "add", cli.out, "--db", url)
        assert done.returncode == 2 and "a database in memory is lost at exit" in done.stderr
    url = f"sqlite:///{cli.folder}/h.db?timeout=30"
    assert cli("history", "add", cli.out, "--db", url).returncode == 0
    assert cli("history", "show", "--db", url).returncode == 0
    done = cli("report", cli.out, "--history", f"sqlite:///{cli.folder}/typo.db")
    assert done.returncode == 2 and "no history in" in done.stderr and not (cli.folder / "typo.db").exists()


def test_doctor_and_listings_have_json(cli):
    for what in ("engines", "suites", "models"):
        assert json.loads(cli("ls", what, "--json").stdout)
    checks = {row["check"]: row["state"] for row in json.loads(cli("doctor", "--json").stdout)}
    assert checks["engine fake"] == "ok"
    assert "memory cap" in checks


def test_dry_run_prints_cells_and_writes_nothing(cli):
    done = cli.run(cli.suite(GOOD), "--dry-run", "--json")
    assert json.loads(done.stdout)["name"] == "a"
    assert not cli.out.exists()


@pytest.mark.parametrize("kind", ["folder", "fifo", "device"])
def test_records_that_are_no_file_are_one_line(cli, kind):
    path = cli.out / "records.jsonl"
    cli.out.mkdir()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/full")
    suite = cli.suite("  - {name: a, engine: fake}")
    for done in (cli.run(suite, timeout=20), cli("report", cli.out, timeout=20)):
        assert done.returncode == 2
        assert "is not a regular file" in done.stderr


def test_an_empty_shard_is_no_failure(cli):
    done = cli.run(cli.suite("  - {name: a, engine: fake}"), "--shard", "2/2")
    assert done.returncode == 0
    assert "shard 2/2 holds no cells" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", [("ls", "models"), ("validate", "tiny.yaml"), ("run", "tiny.yaml", "--dry-run")])
def test_an_output_that_cannot_be_written_is_one_line(cli, arguments):
    cli.suite("  - {name: a, engine: fake}")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            cli.command(*arguments), stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=cli.folder,
            env=cli.environment,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.strip() == "harness: cannot print: No space left on device"


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "NAME"],
        ["compare", "NAME", "NAME"],
        ["history", "show", "--db", "sqlite:///NAME"],
        ["run", "quickstart", "--out", "NAME"],
        ["run", "quickstart", "--data-dir", "NAME"],
        ["run", "NAME.yaml"],
        ["validate", "NAME.yaml"],
    ],
)
def test_a_name_longer_than_a_file_system_takes(cli, arguments):
    done = cli(*(a.replace("NAME", "a" * 300) for a in arguments))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
