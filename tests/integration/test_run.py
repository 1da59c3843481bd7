"""`harness run` from end to end: statuses from evidence, isolation, resuming, and what a crash leaves."""

import random
import signal
import time

import jsonschema
import psutil
import pytest

from harness.api import to_json
from harness.run.store import Store
from harness.schema import run_record_schema
from tests.integration.conftest import RANDOM_SEEDS, end, wait_for

GOOD = "  - {name: good, engine: fake}"
BAD = "  - {name: bad, engine: fake, options: {crash: exception}}"
SLOW = "\n".join(f"  - {{name: c{i}, engine: fake, options: {{sleep_s: 0.05}}, seed: {i}}}" for i in range(3))
ALL = [(f"c{i}", repeat) for i in range(3) for repeat in range(3)]  # of SLOW


def test_every_way_to_end_is_told_apart(cli):
    found = cli.ends("""
  - {name: segv, engine: fake, options: {crash: segv}, expect: error}
  - {name: device, engine: fake, options: {crash: oom_device}, expect: oom_device}
  - {name: too-big, engine: fake, options: {crash: infeasible}, expect: infeasible}
  - {name: loses, engine: fake, options: {lose_request: true}, expect: error}
  - {name: short, engine: fake, options: {wrong_count: true}, expect: error}
  - {name: odd-option, engine: fake, options: {colour: red}, expect: error}
""")
    assert len(found) == 15
    assert "SIGSEGV" in found["segv"].reason
    assert "not answered" in found["loses"].reason
    assert "3 tokens instead of 4" in found["short"].reason
    assert "colour" in found["odd-option"].reason
    assert 0 < found["eats-little"].memory.peak_bytes <= found["eats-little"].memory.limit_bytes
    for record in found.values():
        jsonschema.validate(to_json(record), run_record_schema())
    reports = [f"report.{kind}" for kind in ("html", "md", "csv", "xml")]
    for name in (*reports, "suite.yaml", "records.jsonl", "logs/fine.log"):
        assert (cli.out / name).stat().st_size > 0
    assert not list((cli.folder / "cache" / "work").iterdir()), "what was exchanged is gone"


def test_one_failed_cell_leaves_the_rest_and_sets_the_exit_code(cli):
    done = cli.run(cli.suite(f"{BAD}\n{GOOD}"), code=1)
    assert [r.status for r in cli.records() if r.spec.name == "good"] == ["ok"] * 3
    assert "failed: bad" in done.stderr


def launches(cli):
    return [(r.spec.name, r.repeat) for r in cli.records()]


def test_repeats_are_interleaved_and_each_a_process_of_its_own(cli):
    cli.run(cli.suite("  - {name: a, engine: fake}\n  - {name: b, engine: fake, options: {rate_tok_s: 2000}}"))
    assert launches(cli) == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]


def test_two_runs_are_identical_but_for_times_and_what_the_system_counted(cli):
    suite = cli.suite(f"{GOOD}\n{BAD}", repeats=2)
    runs = []
    for _ in range(2):
        cli.run(suite, "--fresh", code=1)
        runs.append([stable(r) for r in cli.records()])
    assert runs[0] == runs[1]
    assert runs[0][0]["requests"][0]["token_times_s"]


#: Fields that hold times or what the operating system counted; all others repeat exactly for one seed.
VOLATILE = {"started_at", "wall_s", "measurements", "memory", "machine", "bound", "predicted", "provenance", "tuning",
            "trace"}  # fmt: skip


def stable(record):
    body = {k: v for k, v in to_json(record).items() if k not in VOLATILE}
    for name in ("launch_s", "import_s"):
        body["metrics"].pop(name, None)
    return body


def test_children_do_not_outlive_their_launch(cli):
    cli.run(cli.suite("  - {name: parent, engine: fake, options: {spawn_child: true}}", repeats=1))
    assert cli.records()[0].status == "ok"
    assert not left_behind(cli)


def test_resume_runs_only_what_is_missing(cli):
    suite = cli.suite("  - {name: a, engine: fake}\n  - {name: b, engine: fake, seed: 1}", repeats=2)
    cli.run(suite)
    assert "0 launches to do (4 already done; --fresh starts over)" in cli.run(suite).stderr
    assert "2 launches to do (4 already done)" in cli.run(suite, "--set", "repeats=3").stderr
    assert len(cli.records()) == 6
    cli.run(suite, "--fresh")
    assert len(cli.records()) == 4


def test_fresh_of_one_cell_keeps_the_records_of_the_others(cli):
    suite = cli.suite("  - {name: a, engine: fake}\n  - {name: b, engine: fake, seed: 1}", repeats=2)
    cli.run(suite)
    before = [r for r in cli.records() if r.spec.name == "b"]
    assert "2 launches to do" in cli.run(suite, "--fresh", "--cell", "a").stderr
    assert cli.records()[:2] == before
    assert [(r.spec.name, r.repeat) for r in cli.records()[2:]] == [("a", 0), ("a", 1)]
    assert len((cli.out / "records.1.jsonl").read_text().splitlines()) == 2
    assert "0 launches to do (4 already done" in cli.run(suite).stderr


def test_errors_are_tried_again_and_refusals_are_not(cli):
    suite = cli.suite(f"{BAD}\n  - {{name: refuses, engine: fake, options: {{crash: unsupported}}}}")
    cli.run(suite, code=1)
    first = launches(cli)
    assert first.count(("refuses", 0)) == 1
    assert ("refuses", 1) not in first
    cli.run(suite, code=1)
    again = launches(cli)
    assert again.count(("bad", 0)) == 2
    assert again.count(("refuses", 0)) == 1


def test_new_labels_reach_old_records_and_nothing_is_run_again(cli):
    cell = "  - {{name: {}, engine: fake, options: {{crash: exception}}, expect: {}}}"
    cli.run(cli.suite(cell.format("before", "error"), repeats=2))
    done = cli.run(cli.suite(cell.format("after", "error"), repeats=2))
    assert "0 launches to do (2 already done; --fresh starts over)" in done.stderr
    assert "after" in (cli.out / "report.md").read_text()
    assert [r.spec.name for r in cli.records()] == ["before", "before", "after", "after"]
    assert cli.records()[-1].command.endswith("--cell after")


def test_a_longer_timeout_retries_launches_that_timed_out(cli):
    suite = cli.suite("  - {name: slow, engine: fake, options: {sleep_s: 0.3}}", repeats=1)
    cli.run(suite, "--set", "timeout=0.5s", code=1)
    cli.run(suite, "--set", "timeout=0.4s", code=1)
    cli.run(suite, "--set", "timeout=20s")
    assert [r.status for r in cli.records()] == ["timeout", "ok"]


def test_a_resumed_run_does_not_check_the_free_disk_again(cli):
    suite = cli.suite("  - {name: a, engine: fake}", repeats=1)
    hungry = suite.read_text() + "hardware: {requires: {disk_free: 1000TiB}}\n"
    cli.run(suite)
    suite.write_text(hungry)
    cli.run(suite)
    cli(*cli.running(suite, cli.folder / "other"), code=3)


def test_shards_are_disjoint_and_complete(cli):
    suite = cli.suite("\n".join(f"  - {{name: c{i}, engine: fake, seed: {i}}}" for i in range(5)), repeats=1)
    names = []
    for i in (1, 2):
        out = cli.folder / f"shard{i}"
        cli(*cli.running(suite, out), "--shard", f"{i}/2")
        names += [record.spec.name for record in Store(out).records()]
    assert sorted(names) == [f"c{i}" for i in range(5)]
    cli.run(suite, "--shard", "3/2", code=2)


def test_max_batch_is_found_recorded_and_remembered(cli):
    suite = cli.suite("  - {name: a, engine: fake, policy: max_batch, options: {max_batch: 11}}", repeats=1)
    first = cli.run(suite)
    assert "searching: batch 16" in first.stderr
    record = cli.records()[0]
    assert record.load.block_size == 10  # 11 survives too: the search stops within a quarter
    tried = [(t.gpu_batch_size, t.status) for t in record.tuning]
    assert tried[-3:] == [(16, "oom_host"), (12, "oom_host"), (10, "ok")]
    assert record.metrics["num_requests"] == 10
    again = cli.run(suite, "--fresh")
    assert "searching" not in again.stderr
    assert cli.records()[0].tuning == record.tuning


def test_no_batch_that_survives_is_a_result_not_a_crash(cli):
    cell = "  - {name: a, engine: fake, policy: max_batch, options: {max_batch: 0}, expect: oom_host}"
    cli.run(cli.suite(cell, repeats=1))
    assert "no batch survives" in cli.records()[0].reason


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_records_the_launch_in_flight_and_resume_finishes(cli, signum, code):
    cells = "  - {name: quick, engine: fake}\n  - {name: hangs, engine: fake, options: {hang: true}}"
    suite = cli.suite(cells, repeats=1)
    process = cli.start(*cli.running(suite))
    wait_for((cli.out / "records.jsonl").exists)
    time.sleep(0.5)
    process.send_signal(signum)
    assert process.wait(timeout=20) == code
    assert "run the same command again" in process.stderr.read()
    assert [(r.spec.name, r.status) for r in cli.records()] == [("quick", "ok"), ("hangs", "interrupted")]
    cli.run(suite, "--set", "timeout=1s", code=1)
    assert [(r.spec.name, r.status) for r in cli.records()][2:] == [("hangs", "timeout")]


@pytest.mark.parametrize("seed", RANDOM_SEEDS)
def test_ctrl_c_at_random_ends_in_one_line_and_loses_nothing(cli, seed):
    suite = cli.suite(SLOW, repeats=3)
    rng = random.Random(seed)
    lock = cli.out / ".lock"
    for _ in range(4):
        lock.unlink(missing_ok=True)  # of the launch before: before this one takes it, Ctrl-C is the interpreter's
        process = cli.start(*cli.running(suite))
        wait_for(lock.exists)
        time.sleep(rng.uniform(0.2, 2.0))
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=20)[1]
        assert process.returncode in (0, 130)
        assert "Traceback" not in told
        assert not left_behind(cli)
    cli.run(suite)
    assert sorted((r.spec.name, r.repeat) for r in cli.records() if r.status != "interrupted") == ALL


@pytest.mark.parametrize("seed", RANDOM_SEEDS)
def test_kill_minus_nine_at_random_loses_and_repeats_nothing(cli, seed):
    suite = cli.suite(SLOW, repeats=3)
    rng = random.Random(seed)
    kept: list[str] = []
    for _ in range(4):
        process = cli.start(*cli.running(suite))
        time.sleep(rng.uniform(0.2, 2.0))
        end(process)
        wait_for(lambda: not left_behind(cli))
        path = cli.out / "records.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        assert lines[: len(kept)] == kept, "a record that was written stays"
        kept = lines
    cli.run(suite)
    assert path.read_text().split("\n")[: len(kept)] == kept
    assert sorted(launches(cli)) == ALL


def test_a_full_disk_stops_with_one_line_and_resume_finishes(cli):
    suite = cli.suite(SLOW, repeats=2)
    cli.run(suite, "--shard", "1/3")
    size = (cli.out / "records.jsonl").stat().st_size
    assert "free space" in cli.on_full_disk(size + 100, *cli.running(suite))
    assert (cli.out / "records.jsonl").stat().st_size == size
    cli.run(suite)
    assert len(cli.records()) == 6


def left_behind(cli):
    """Processes that still have this test's folder in their environment."""
    return [p for p in psutil.process_iter(["environ"]) if str(cli.folder) in str(p.info["environ"])]
