"""Jobs and suites on a real Ray cluster of this host: workers, nodes and commands are killed, and nothing is lost."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import end, wait_for
from tests.integration.test_generate import Files
from tests.offload import save_with_tokenizer

pytestmark = pytest.mark.slow

#: Enough for Ray's own store on each node, and nodes that are missed soon.
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "memory": 4 << 30, "include_dashboard": False}
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}


@pytest.fixture(scope="module")
def ray_folder():
    """Where Ray has its sockets and logs, told to it. CI fails without Ray, others are told."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("submitit") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs Ray and submitit: make .venv/.ray")
    folder = tempfile.mkdtemp(prefix="ray")  # short: names of sockets are
    (Path(folder) / "ray").mkdir()
    code = str(Path(__file__).parents[2])
    # Ray runs workers at a niceness of 15, with which they get next to nothing beside other tests
    quick = {"RAY_worker_niceness": "0"}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder, "PYTHONPATH": code, **quick}
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(ray_folder):
    """Two nodes."""
    from ray.cluster_utils import Cluster

    head = {**NODE, "node_name": "first", "_system_config": HEALTH, "no_monitor": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**NODE, node_name="second")
    yield cluster
    cluster.shutdown()


@pytest.fixture
def files(cli, cluster):
    found = Files(cli)
    found.on_ray = ("--memory", "1GiB", "--ray", cluster.address, "--workers", 2)
    return found


@pytest.fixture
def begun():
    """Starts a job of files in the background and waits for its first answer; it is ended with the test."""
    started = []

    def begin(files, *more):
        started.append(files.cli.start(*files.command(*more)))
        wait_for(lambda: files.output.exists() and files.output.stat().st_size, 300)
        return started[-1]

    yield begin
    for process in started:
        end(process)


def workers():
    """Ray's processes that run an actor of ours."""
    return [p for p in psutil.Process().children(recursive=True) if "ray::Worker" in command_of(p)]


def command_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def rows(path):
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["line"])


def slow(seconds):
    """Options of a job whose passes take so long, and whose shards are small."""
    return "--set", f"options.sleep_s={seconds}", "--set", "policy.gpu_batch_size=2"


def alone(files):
    """The answers of the same job without Ray."""
    there, files.output = files.output, files.cli.folder / "alone.jsonl"
    files("--memory", "1GiB")
    alone, files.output = rows(files.output), there
    return alone


def test_workers_and_a_node_are_killed_and_every_line_is_answered_once(files, begun, cluster):
    lines = ({"custom_id": f"r{i}", "prompt": f"prompt {i}", "max_tokens": 3, "temperature": 1} for i in range(36))
    files.write({"prompt": "twice", "n": 2, "temperature": 0.5, "max_tokens": 3}, *lines)
    third = cluster.add_node(**NODE, node_name="third")
    process = begun(files, *files.on_ray[:-1], 3, *slow(0.3))
    wait_for(lambda: len(workers()) == 3, 120)
    workers()[0].kill()
    wait_for(lambda: len(files.output.read_text().splitlines()) > 9, 120)
    cluster.remove_node(third, allow_graceful=False)
    told = process.communicate(timeout=120)[1]
    assert process.returncode == 0, told
    assert told.count("another takes its place") == 2
    assert sorted(files.answers()) == list(range(1, 38))
    assert rows(files.output) == alone(files), "seeds do not depend on who answers"


@pytest.mark.release  # minutes, of which the others show the most
def test_the_command_is_killed_and_goes_on_with_and_without_ray(files, begun):
    files.write(*({"prompt": f"{i}", "max_tokens": 2} for i in range(60)))
    end(begun(files, *files.on_ray, *slow(0.2)))
    kept = files.output.read_text().split("\n")[:-1]
    assert 0 < len(kept) < 60
    wait_for(lambda: not workers())
    process = begun(files, *files.on_ray, *slow(0.2))
    wait_for(lambda: len(files.output.read_text().splitlines()) > len(kept), 120)
    process.send_signal(signal.SIGTERM)
    assert "run the same command again to resume" in process.communicate(timeout=120)[1]
    assert process.returncode == 143
    files("--memory", "1GiB")
    assert files.output.read_text().split("\n")[: len(kept)] == kept
    assert sorted(files.answers()) == list(range(1, 61))


def test_a_shard_that_kills_its_workers_is_answered_with_the_reason(files):
    files.write({"prompt": "a", "max_tokens": 2}, {"prompt": "b", "max_tokens": 2})
    one = (*files.on_ray[:-1], 1)
    files(*one, "--set", "options.crash=sigkill", code=1)
    answered = [row["error"] for row in rows(files.output)]
    assert all("a worker was lost over this line or those beside it 3 times" in error["message"] for error in answered)
    told = files(*one, "--set", "options.crash=exception", code=2).stderr
    assert "a worker on node" in told and "engine fake failed (error): RuntimeError" in told
    files("--memory", "1GiB")
    assert all(row["error"] is None for row in rows(files.output))


def test_what_cannot_be_is_one_line(files):
    files.write({"prompt": "a"})
    assert "has room for 2 workers of 1 core and 1.0 GiB each, not for 3" in files.refused(*files.on_ray[:-1], 3)
    assert "nobody answers there" in files.refused("--memory", "1GiB", "--ray", "127.0.0.1:1", "--workers", 1)
    assert "workers need --memory" in files("--ray", "auto", "--workers", 1, code=2).stderr
    assert "--workers goes with --ray" in files("--ray", "auto", code=2).stderr
    assert "expected KEY=VALUE" in files.refused("--memory", "1GiB", "--slurm", "4", "--workers", 1)


class OwnFiles(Files):
    """Of a job of our own engine, which streams a small model's weights from disk."""

    def command(self, *more):
        options = ("--memory", "1GiB", "--set", "policy.weights=[0,0.5,0.5]", "--set", "policy.gpu_batch_size=2")
        files = ("--input", self.source, "--output", self.output)
        return ["generate", "--model", self.cli.folder / "model", *files, *options, *more]


def test_our_engine_on_two_nodes_answers_as_on_one_though_a_worker_of_two_ranks_dies(cli, kernels, begun, cluster):
    files = OwnFiles(cli)
    save_with_tokenizer(cli.folder / "model")
    files.write(*({"prompt": f"w{5 + i} w9 w{7 + i}", "max_tokens": 40, "temperature": i % 2} for i in range(60)))
    on_ray = ("--ray", cluster.address, "--workers", 2, "--set", "policy.pipeline=2", "--set", "limits.threads=1")
    assert "has room for 0 workers of 2 cores" in files.refused(*on_ray), "a worker has all of its ranks on one node"
    third, fourth = (cluster.add_node(**NODE | {"num_cpus": 2}, node_name=name) for name in ("third", "fourth"))
    process = begun(files, *on_ray)
    ranks = [p for p in psutil.Process().children(recursive=True) if "engines.offload.rank" in command_of(p)]
    assert len(ranks) in (1, 2), "of those workers that have loaded"
    workers()[0].kill()
    told = process.communicate(timeout=180)[1]
    assert process.returncode == 0, told
    assert told.count("another takes its place") == 1
    for node in (third, fourth):
        cluster.remove_node(node)
    wait_for(lambda: not [p for p in ranks if p.is_running() and p.status() != psutil.STATUS_ZOMBIE])
    answered, files.output = rows(files.output), cli.folder / "alone.jsonl"
    files()
    assert answered == rows(files.output)


CELLS = """
  - {name: a, engine: fake, options: {sleep_s: 0.05}}
  - {name: b, engine: fake, options: {rate_tok_s: 2000}}
"""
TWO = "[{prompt_len: 8, gen_len: 4}, {prompt_len: 8, gen_len: 6}]"


def test_a_suite_is_measured_on_nodes_each_workload_on_one(cli, cluster):
    suite = cli.suite(CELLS, workload=TWO, repeats=2, timeout="120s")
    on_ray = ("--ray", cluster.address, "--no-report")
    process = cli.start(*cli.running(suite), *on_ray)
    wait_for(lambda: len(cli.records()) >= 3, 120)
    end(process)
    kept = cli.records()
    told = cli.run(suite, *on_ray).stderr
    records = cli.records()
    assert records[: len(kept)] == kept
    assert f"{8 - len(kept)} launches to do" in told
    assert sorted((r.spec.name, r.repeat) for r in records) == sorted({(r.spec.name, r.repeat) for r in records})
    assert len(records) == 8 and {r.status for r in records} == {"ok"}
    nodes = {}
    for record in records:
        nodes.setdefault(record.spec.workload.gen_len, []).append(record)
        assert (cli.out / record.log).stat().st_size > 0
    assert all(len({r.provenance["node"] for r in of_one}) == 1 for of_one in nodes.values())
    assert len({r.provenance["node"] for r in records}) == 2
    for of_one in nodes.values():
        names = [r.spec.name.partition("-")[0] for r in of_one]
        assert names[0] != names[1] and names[2] != names[3], "each round runs both"
    assert "0 launches to do (8 already done" in cli.run(suite, *on_ray).stderr
    wanting = cli.suite(CELLS, hardware="{requires: {machine: epyc}}")
    assert "no node of the cluster meets tiny" in cli.run(wanting, *on_ray, code=3).stderr


def test_a_suite_of_our_engine_goes_on_elsewhere_when_its_node_dies(cli, kernels, cluster):
    save_with_tokenizer(cli.folder / "model")
    cells = """
  - {name: row, engine: offload, policy: {gpu_batch_size: 2}}
  - {name: ranks, engine: offload, policy: {gpu_batch_size: 2, pipeline: 2}}
"""
    limits = "{requires: {machine: twin}, limits: {host_memory: 1GiB}}"
    changes = {"model": f"{{id: {cli.folder / 'model'}}}", "hardware": limits, "timeout": "120s"}
    suite = cli.suite(cells, workload=TWO, repeats=1, **changes)
    twins = [cluster.add_node(**NODE, node_name=name, resources={"twin": 1}) for name in ("third", "fourth")]
    process = cli.start(*cli.running(suite), "--ray", cluster.address, "--no-report")
    wait_for(cli.records, 240)
    cluster.remove_node(twins.pop(), allow_graceful=False)
    told = process.communicate(timeout=600)[1]
    cluster.remove_node(twins.pop())
    assert process.returncode == 0, told
    records = cli.records()
    assert {r.status for r in records} == {"ok"}
    assert sorted((r.spec.name, r.repeat) for r in records) == sorted({(r.spec.name, r.repeat) for r in records})
    assert len(records) == 4
    by_workload = {}
    for record in records:
        by_workload.setdefault(record.spec.workload.gen_len, set()).add(record.provenance["node"])
    assert [len(nodes) for nodes in by_workload.values()] == [1, 1], "what is compared was measured on one node"


@pytest.mark.release  # minutes, of which the others show the most
def test_jobs_of_slurm_are_a_cluster(cli, ray_folder):
    """On submitit's executor for this host, whose own processes end in a traceback when they are cancelled."""
    files, before = Files(cli), set(psutil.pids())
    files.write(*({"prompt": f"{i}", "max_tokens": 2} for i in range(20)))
    jobs = "cluster=local,nodes=1,cpus_per_task=1,timeout_min=5"
    command = cli.command(*files.command("--memory", "200MiB", "--slurm", jobs, "--workers", 1))
    done = subprocess.run(command, env=cli.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "jobs submitted: " in done.stderr
    assert sorted(files.answers()) == list(range(1, 21))
    wait_for(lambda: not [p for p in psutil.process_iter() if p.pid not in before and "raylet" in command_of(p)], 60)


def test_a_cluster_that_goes_away_ends_the_job_in_a_line(files, cluster):
    """The last test: the cluster is gone."""
    files.write(*({"prompt": f"{i}", "max_tokens": 2} for i in range(40)))
    address = cluster.address
    command = files.command("--memory", "1GiB", "--ray", address, "--workers", 1, *slow(0.3))
    script = "import harness.cluster.connection as c; c._SILENCE_S = 3; from harness.cli.main import main; main()"
    job = [sys.executable, "-c", script, *map(str, command)]
    with subprocess.Popen(job, env=files.cli.environment, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: files.output.exists() and files.output.stat().st_size, 300)
        cluster.shutdown()
        told = process.communicate(timeout=120)[1]
    assert process.returncode == 2, told
    (error,) = [line for line in told.splitlines() if line.startswith("harness: ")]
    assert f"the Ray cluster of {address} went away" in error
    files("--memory", "1GiB")
    assert sorted(files.answers()) == list(range(1, 41))
