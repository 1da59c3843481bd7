"""What a user can get wrong on the command line: one clear line, the documented exit code, no traceback."""

import fcntl
import json
import os
import shlex
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("run nowhere.yaml", "nowhere.yaml"),
        ("run nowhere", "no suite file or shipped suite 'nowhere'"),
        ("validate nowhere.yaml", "nowhere.yaml"),
        ("report nowhere", "nowhere"),
        ("run", "Missing argument"),
        ("rum", "rum"),
        ("ls colours", "colours"),
        ("run tiny.yaml --out out --engine fakes", "no engine 'fakes'"),
        ("run tiny.yaml --out out --cell b", "no cell 'b'"),
        ("run tiny.yaml --out out --shard 0/2", "--shard 0/2"),
        ("run tiny.yaml --out out --shard x", "--shard x"),
        ("run tiny.yaml --out out --set polici.schedule=row", "polici"),
        ("run tiny.yaml --out out --set repeats", "repeats"),
        ("run tiny.yaml --out out --json", "--json goes with --dry-run"),
    ],
)
def test_wrong_usage_is_refused_before_anything_runs(cli, line, words):
    cli.suite()
    assert words in cli(*line.split(), code=2).stderr
    assert not cli.out.exists()


def test_unknown_engine_names_file_line_and_neighbour(cli):
    done = cli("validate", cli.suite("  - {name: a, engine: fakke}"), code=2)
    assert "tiny.yaml:9:" in done.stderr
    assert "did you mean 'fake'" in done.stderr


def test_a_limit_that_nothing_would_keep_is_refused(cli):
    done = cli.run(cli.suite("  - {name: a, engine: fake, limits: {device_memory: 1GiB}}", repeats=1), code=1)
    assert "unsupported" in done.stdout
    assert "limits.device_memory" in done.stdout + done.stderr


def test_an_override_that_no_cell_reads_is_refused_as_an_unknown_key_is(cli):
    suite = cli.suite("  - {name: a, engine: fake}\n  - {name: b, engine: offload, model: {id: m}}", repeats=1)
    for more in ("--dry-run",), ():
        assert "--set schedule=sweep" in cli.refused("run", suite, "--cell", "a", "--set", "schedule=sweep", *more)
    row = ("--cell", "b", "--set", "policy.num_gpu_batches=4", "--dry-run")
    assert "policy.num_gpu_batches is for zigzag" in cli.refused("run", suite, *row)
    cli("run", suite, *row, "--set", "schedule=zigzag")
    cli("run", suite, "--set", "schedule=sweep", "--dry-run")  # one of two reads it
    assert not cli.out.exists()


def test_overrides_that_make_cells_alike_are_told_how_to_choose(cli):
    suite = cli.suite("  - {name: a, engine: fake, seed: 1}\n  - {name: b, engine: fake}", repeats=1)
    done = cli.run(suite, "--set", "seed=7", code=2)
    assert "'a' and 'b' measure the same" in done.stderr
    cli.run(suite, "--set", "seed=7", "--cell", "a")


def test_output_that_cannot_be_written(cli):
    (cli.folder / "file").write_text("")
    assert "--out" in cli.refused("run", cli.suite(), "--out", cli.folder / "file" / "out")


def test_a_machine_that_is_too_small_is_told_what_it_lacks(cli):
    done = cli.run(cli.suite(hardware="{requires: {host_memory: 900TiB, device_memory: 10TiB}}"), code=3)
    assert "host memory: 921600.0 GiB required" in done.stderr
    assert "device memory" in done.stderr


def test_two_harnesses_on_one_directory(cli):
    cli.out.mkdir()
    with (cli.out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "in use by another harness" in cli.run(cli.suite(), code=2).stderr


def test_a_newer_record_is_refused_before_anything_runs(cli):
    cli.out.mkdir()
    (cli.out / "records.jsonl").write_text(json.dumps({"schema_version": 99}) + "\n")
    assert "schema_version 99 is newer" in cli.run(cli.suite(), code=2).stderr


def test_a_folder_named_like_our_packages_does_not_shadow_them(cli):
    (cli.folder / "engines").mkdir()
    (cli.folder / "engines" / "__init__.py").write_text("raise SystemExit('shadowed')")
    cli.run(cli.suite(repeats=1))


@pytest.fixture
def closed():
    """A pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        yield pipe


def test_closed_streams_do_not_change_the_exit_code(cli, closed):
    cli("ls", "engines", stdout=closed, code=None)
    (cli.folder / "bad.yaml").write_text("name: [")
    for more in ((), ("--json",)):
        cli("validate", "bad.yaml", *more, stdout=closed, stderr=closed, code=2)
    done = cli("validate", "bad.yaml", "quickstart", stderr=closed, code=2)
    assert "quickstart: ok" in done.stdout, "stdout is another pipe"
    infeasible = ("facebook/opt-30b", "--prompt-len", 512, "--gen-len", 32, "--hardware", "t4_gcp", "--latency", 0.01)
    cli("plan", *infeasible, stderr=closed, code=4)


def make_odd(path, kind):
    """A folder, a pipe, or a link to a device or to itself."""
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"device": "/dev/full", "loop": path.name}[kind])


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "loop"])
def test_an_out_that_is_no_file_stays_what_it_is(cli, kind):
    odd = cli.folder / "odd"
    make_odd(odd, kind)
    cli.run(cli.suite(repeats=1))
    before = odd.lstat().st_mode
    for arguments in (("report", cli.out, "--out", odd / "x.html"), ("compare", cli.out, cli.out, "--out", odd)):
        fits = kind == "folder" and arguments[0] == "report"
        cli(*arguments) if fits else cli.refused(*arguments)
    assert odd.lstat().st_mode == before


def test_an_out_that_is_a_link_stays_one(cli):
    (cli.folder / "link").symlink_to("kept.md")
    (cli.folder / "kept.md").write_text("old")
    cli.run(cli.suite(repeats=1))
    cli("compare", cli.out, cli.out, "--out", cli.folder / "link")
    assert (cli.folder / "link").is_symlink() and "no change" in (cli.folder / "kept.md").read_text()


def test_a_circular_link_and_a_deleted_working_folder_are_one_line(cli):
    suite = cli.suite(repeats=1)
    (cli.folder / "circle").symlink_to("circle")
    assert cli.refused("run", suite, "--out", cli.folder / "circle" / "x")
    gone = cli.folder / "gone"
    gone.mkdir()
    command = ["sh", "-c", 'rmdir "$0" && exec "$@"', str(gone), *cli.command("run", suite)]
    assert "is gone; cd elsewhere" in cli.execute(command, code=2, cwd=gone).stderr


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "cp437", "ascii"])
def test_terminals_that_do_not_know_every_sign(cli, encoding):
    terminal = {"env": cli.environment | {"PYTHONIOENCODING": encoding}, "errors": "replace"}
    cli.run(cli.suite(repeats=1), **terminal)
    cli("compare", cli.out, cli.out, "--format", "md", **terminal)


def test_closed_or_full_stderr_stops_no_run(cli):
    suite = cli.suite(repeats=1)
    for way in ("2>&-", "2>/dev/full"):
        line = f"exec {shlex.join(cli.command('run', suite, '--fresh', '--out', cli.out))} {way}"
        cli.execute(["sh", "-c", line])


def test_a_history_in_memory_or_at_a_wrong_path_is_refused(cli):
    cli.run(cli.suite(repeats=1))
    for url in ("sqlite://", "sqlite:///", "sqlite:///:memory:"):
        done = cli("history", "add", cli.out, "--db", url, code=2)
        assert "a database in memory is lost at exit" in done.stderr
    url = f"sqlite:///{cli.folder}/h.db?timeout=30"
    cli("history", "add", cli.out, "--db", url)
    cli("history", "show", "--db", url)
    done = cli("report", cli.out, "--history", f"sqlite:///{cli.folder}/typo.db", code=2)
    assert "no history in" in done.stderr and not (cli.folder / "typo.db").exists()


def test_doctor_and_listings_have_json(cli):
    for what in ("engines", "suites", "models"):
        assert json.loads(cli("ls", what, "--json").stdout)
    checks = {row["check"]: row["state"] for row in json.loads(cli("doctor", "--json").stdout)}
    assert checks["engine fake"] == "ok"
    assert "memory cap" in checks


def test_dry_run_prints_cells_and_writes_nothing(cli):
    assert json.loads(cli.run(cli.suite(), "--dry-run", "--json").stdout)["name"] == "a"
    assert not cli.out.exists()


@pytest.mark.parametrize("kind", ["folder", "fifo", "device"])
def test_records_that_are_no_file_are_one_line(cli, kind):
    path = cli.out / "records.jsonl"
    cli.out.mkdir()
    make_odd(path, kind)
    for arguments in (("run", cli.suite(), "--out", cli.out), ("report", cli.out)):
        assert "is not a regular file" in cli(*arguments, code=2, timeout=20).stderr


def test_an_empty_shard_is_no_failure(cli):
    assert "shard 2/2 holds no cells" in cli.run(cli.suite(), "--shard", "2/2").stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "models"),
        ("validate", "tiny.yaml"),
        ("run", "tiny.yaml", "--dry-run"),
        ("--help",),
        ("--version",),
        ("run", "--help"),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line(cli, arguments):
    cli.suite()
    with Path("/dev/full").open("w") as full:
        assert cli.refused(*arguments, stdout=full) == "harness: cannot print: No space left on device"


def test_a_version_that_finds_a_full_disk_is_one_line(cli):
    with (cli.folder / "log").open("w") as log:
        assert "harness: cannot print" in cli.on_full_disk(0, "--version", stdout=log)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(("line", "code"), [("rum", 2), ("validate bad.yaml", 2), ("ls models", 0), ("report no", 2)])
def test_a_full_stderr_leaves_a_command_its_exit_code(cli, line, code):
    """Python ends with 120 where it cannot flush a stream."""
    (cli.folder / "bad.yaml").write_text("name: [")
    with Path("/dev/full").open("w") as full:
        cli(*line.split(), stderr=full, code=code)


def test_help_that_nobody_reads_is_no_failure(cli, closed):
    for arguments in (("--help",), ("run", "--help")):
        cli(*arguments, stdout=closed)


def test_ctrl_c_while_modules_are_imported_is_130_without_a_traceback(cli):
    """A module that is imported first, and sends the signal."""
    (cli.folder / "click.py").write_text("import os, time\nos.kill(os.getpid(), 2)\ntime.sleep(5)\n")
    undo = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    done = cli.execute([sys.executable, "-c", undo, sys.executable, "-m", "harness", "--help"], code=130)
    assert not done.stderr


def test_ctrl_c_while_a_command_imports_is_130_without_a_traceback(cli):
    """A module that `harness validate` imports when it has begun."""
    (cli.folder / "pydantic.py").write_text("import os, time\nos.kill(os.getpid(), 2)\ntime.sleep(5)\n")
    undo = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", undo, sys.executable, "-m", "harness", "validate", str(cli.suite())]
    assert not cli.execute(command, code=130).stderr


def test_surroundings_that_lack_something_are_one_line(cli):
    """A compiler that is no command line; a user without a home."""
    odd = cli.environment | {"CXX": "g++ 'unclosed"}
    done = cli("doctor", env=odd)
    assert "is no command line" in done.stdout, "a check among the others"
    script = (
        "import os, pathlib\n"
        "def nobody(): raise RuntimeError('Could not determine home directory.')\n"
        "pathlib.Path.home = staticmethod(nobody)\n"
        "from harness.cli.main import main; main()"
    )
    command = [sys.executable, "-c", script, "run", str(cli.suite(repeats=1)), "--out", str(cli.out)]
    homeless = {k: v for k, v in cli.environment.items() if k not in ("HARNESS_CACHE", "XDG_CACHE_HOME")}
    assert "set HARNESS_CACHE" in cli.execute(command, env=homeless, code=2).stderr
    cli.execute([*command, "--extra-tries", "0"])


@pytest.mark.parametrize(
    "line",
    [
        "report NAME",
        "compare NAME NAME",
        "history show --db sqlite:///NAME",
        "run quickstart --out NAME",
        "run quickstart --data-dir NAME",
        "run NAME.yaml",
        "validate NAME.yaml",
    ],
)
def test_a_name_longer_than_a_file_system_takes(cli, line):
    assert cli.refused(*line.replace("NAME", "a" * 300).split())
