"""Cells in real containers: how they end, what they may do, and what is left when something dies."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import pytest

from harness.launchers.owners import OWNER
from tests import container_engine
from tests.integration.conftest import end, wait_for
from tests.offload import save_with_tokenizer

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.containers]
FEW = ("--set", "workload.num_requests=4")


@pytest.fixture(scope="module")
def engine():
    """An engine's address. Where none can be had CI fails, and everyone else is told."""
    try:
        with container_engine.engine() as address, pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_HOST", address)
            yield address
    except RuntimeError as exc:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no container engine: {exc}")


@pytest.fixture(scope="module")
def client(engine):
    return docker.from_env()


def build(*names: str) -> None:
    """The engines' images, by the command that users have."""
    wheels = Path(os.environ.get("PIP_FIND_LINKS", "-"))
    options = ["--build-arg", f"BASE_IMAGE={container_engine.BASE_IMAGE}"]
    options += ["--wheels", str(wheels)] if wheels.is_dir() else []
    command = [str(Path(sys.executable).with_name("harness")), "images", "build", *names, "--host-network", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def images(engine):
    """The smallest image: the harness and its fake engine."""
    container_engine.base_image(engine)
    build("harness")


def test_every_way_to_end_is_told_apart(cli, images, client):
    found = cli.ends("""
  - {name: no-image, engine: fake, image: "offload-harness/nothing", expect: error}
  - {name: other-image, engine: fake, image: "offload-harness-tests/python:3.11", expect: error}
  - {name: odd-image, engine: fake, image: "Not A Name", expect: error}
""", launcher="docker")  # fmt: skip
    assert found["eats-little"].memory.method.startswith("container")
    assert found["fine"].provenance["image"] == "offload-harness/harness"
    assert found["fine"].provenance["image_digest"].startswith("sha256:")
    assert "no image offload-harness/nothing" in found["no-image"].reason
    assert "no worker of this harness" in found["other-image"].reason
    assert "no image Not A Name" in found["odd-image"].reason
    assert client.containers.list(all=True, filters={"label": OWNER}) == []


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_told(cli, images):
    cell = "  - {name: gpu, engine: fake, limits: {device_memory: 1GiB}, expect: unsupported}"
    cli.run(cli.suite(cell, repeats=1, launcher="docker"))
    (record,) = cli.records()
    assert "no GPU" in record.reason


def test_a_path_with_spaces_and_colons_and_two_harnesses_at_once(cli, images, tmp_path):
    odd = tmp_path / "a folder: with, odd = names"
    odd.mkdir()
    suite = cli.suite("  - {name: fine, engine: fake, options: {sleep_s: 1.0}}", repeats=2, launcher="docker")
    outs = [odd / "one", odd / "two"]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda out: cli(*cli.running(suite, out)), outs))
    for out in outs:
        assert len((out / "records.jsonl").read_text().splitlines()) == 2


def test_containers_of_a_killed_harness_are_removed_by_the_next(cli, images, client):
    suite = cli.suite("  - {engine: fake, options: {hang: true}, timeout: 300s}", repeats=1, launcher="docker")
    process = cli.start(*cli.running(suite))
    wait_for(lambda: client.containers.list(filters={"label": OWNER}), seconds=60)
    end(process)
    assert client.containers.list(filters={"label": OWNER}), "it is still there"
    other = cli.suite(repeats=1, launcher="docker", name="other")
    cli(*cli.running(other, cli.folder / "other"))
    assert client.containers.list(all=True, filters={"label": OWNER}) == []


def test_a_results_folder_that_cannot_be_written_is_told_in_one_line(cli, images):
    assert cli.refused("run", cli.suite(repeats=1, launcher="docker"), "--out", "/proc/no")


def test_no_engine_is_told_with_the_remedy(cli, images, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    done = cli.run(cli.suite(repeats=1, launcher="docker"), code=2)
    assert "start Docker or set DOCKER_HOST" in done.stderr
    assert "process" in cli("ls", "engines").stdout


@pytest.mark.parametrize(
    ("image", "cells"),
    [
        ("offload", ("offload-sweep", "offload-zigzag")),
        # another image of a gigabyte, made in the same way: before a release
        pytest.param("accelerate", ("accelerate", "transformers-within-limit"), marks=pytest.mark.release),
    ],
)
def test_quickstart_runs_in_containers(cli, images, image, cells):
    """Without its probes, its search for the rival's batch and most of its requests, which take minutes and do the
    same anywhere."""
    suite, text = cli.folder / "quickstart.yaml", (ROOT / "suites" / "quickstart.yaml").read_text()
    searched = "max_batch: true, gpu_batch_size: 24}, candidates: {policy.compute_dtype: [float32]}"
    assert searched in text
    build(image)
    # the first launch compiles the kernels, beside other tests
    text = text.replace(searched, "gpu_batch_size: 4}").replace("timeout: 2min", "timeout: 10min")
    suite.write_text(f"{text}machine_probe: false\n")
    chosen = [option for cell in cells for option in ("--cell", cell)]
    cli(*cli.running(suite), "--launcher", "docker", "--set", "repeats=1", *FEW, *chosen)
    for name, record in cli.by_name().items():
        assert record.provenance["image"] == f"offload-harness/{image}"
        assert record.status == ("infeasible" if name == "transformers-within-limit" else "ok")
        assert record.memory.limit_bytes is not None
    assert (cli.out / "report.html").exists()


def test_an_engine_that_dies_is_an_error_and_its_worker_ends(cli, images):
    """Of an engine of its own: the shared one is not killed."""
    with container_engine.private_engine() as (address, pid):
        container_engine.copy_image("offload-harness/harness", address)
        suite = cli.suite("  - {engine: fake, options: {hang: true}, timeout: 120s}", repeats=1, launcher="docker")
        process = cli.start(*cli.running(suite), DOCKER_HOST=address)
        client = docker.DockerClient(base_url=address)
        wait_for(lambda: client.containers.list(filters={"label": OWNER}), seconds=60)
        os.kill(pid, 9)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    (record,) = cli.records()
    assert record.status == "error"
    assert "engine was lost" in record.reason


def compose() -> list[str]:
    """The command of Docker Compose that is here, of either version."""
    for command in (["docker", "compose"], ["docker-compose"]):
        try:
            if subprocess.run([*command, "version"], capture_output=True, check=False).returncode == 0:
                return command
        except FileNotFoundError:
            continue
    (pytest.fail if os.environ.get("CI") else pytest.skip)("no Docker Compose here")
    return []


@pytest.mark.parametrize(
    ("folder", "profile"), [(".", "gpu"), (".", "cpu"), (".", "serve"), ("examples/two_hosts", "")]
)
def test_compose_s_file_is_valid(folder, profile):
    command = [*compose(), *(["--profile", profile] if profile else []), "config", "-q"]
    done = subprocess.run(command, cwd=ROOT / folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_compose_runs_a_suite_and_leaves_the_report(images, tmp_path):
    """Its default, quickstart, takes minutes for what the short suite shows as well."""
    build("offload")
    (tmp_path / "results").mkdir()
    once = tmp_path / "once.yaml"  # beside other tests each launch would count as disturbed, and run three times
    options = ["run", "${SUITE}", "--out", "/results/${SUITE}", "--extra-tries", "0", "--set", "repeats=1", *FEW]
    once.write_text(json.dumps({"services": {"cpu": {"command": options}}}))
    file = ["-f", str(ROOT / "compose.yaml"), "-f", str(once), "--project-directory", str(tmp_path)]
    subprocess.run(["docker", "tag", "offload-harness/offload", "offload-harness/compose"], check=True)
    command = [*compose(), *file, "--profile", "cpu"]
    try:
        up = [*command, "up", "--no-build"]
        short = os.environ | {"SUITE": "ci_smoke"}
        done = subprocess.run(up, cwd=tmp_path, env=short, capture_output=True, text=True, check=False)
    finally:
        subprocess.run([*command, "down", "-v"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = tmp_path / "results" / "ci_smoke" / "report.html"
    assert report.exists(), done.stdout[-2000:]


def test_compose_divides_a_model_over_two_containers(images, cli, tmp_path):
    """The example as it is, but for the network: this engine may have no bridge."""
    build("offload")
    job = tmp_path / "job"
    save_with_tokenizer(job / "model")
    for place in (job, *job.rglob("*")):
        place.chmod(0o777 if place.is_dir() else 0o644)
    lines = [{"prompt": f"w{5 + i} w9", "max_tokens": 12, "ignore_eos": True} for i in range(12)]
    (job / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shutil.copy(ROOT / "examples" / "two_hosts" / "compose.yaml", tmp_path)
    host = {"network_mode": "host"}
    (tmp_path / "host.yaml").write_text(json.dumps({"services": {"rank0": host, "rank1": host}}))
    project = [*compose(), "-f", "compose.yaml", "-f", "host.yaml"]
    environment = os.environ | {"FIRST": "127.0.0.1", "PORT": str(_free_port()), "MEMORY": "300MiB", "LIMIT": "2g"}
    command = [*project, "up", "--exit-code-from", "rank0"]
    try:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    finally:
        subprocess.run([*project, "down", "-v"], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    files = ["--input", job / "prompts.jsonl", "--output", tmp_path / "alone.jsonl"]
    cli("generate", "--model", job / "model", "--memory", "300MiB", *files)
    divided, alone = (
        {row["line"]: row["response"]["body"]["choices"] for row in map(json.loads, path.read_text().splitlines())}
        for path in (job / "answers.jsonl", tmp_path / "alone.jsonl")
    )
    assert len(divided) == 12 and divided == alone


def test_a_model_is_served_by_its_image(images, client, tmp_path):
    """A request is answered, and a stop lets the server end by itself."""
    build("serve")
    model = save_with_tokenizer(tmp_path / "m")
    model.chmod(0o755)  # the server is not root
    for path in model.iterdir():
        path.chmod(0o644)
    port = _free_port()
    command = ["--model", "/models/m", "--memory", "512MiB", "--port", str(port)]
    container = client.containers.run(
        "offload-harness/serve", command, detach=True, network_mode="host", environment={"HARNESS_API_KEY": "secret"},
        mounts=[docker.types.Mount("/models/m", str(model), "bind", read_only=True)], cap_drop=["ALL"], init=True,
    )  # fmt: skip

    def asked(path: str, body: object = None) -> dict[str, object]:
        data = None if body is None else json.dumps(body).encode()
        url, key = f"http://127.0.0.1:{port}{path}", {"authorization": "Bearer secret"}
        with urllib.request.urlopen(urllib.request.Request(url, data, key), timeout=60) as answer:
            return json.load(answer)

    def ready() -> bool:
        with contextlib.suppress(OSError):
            return bool(asked("/ready")["ready"])
        container.reload()
        assert container.status != "exited", container.logs().decode()[-2000:]
        return False

    try:
        wait_for(ready, seconds=240)
        answer = asked("/v1/completions", {"prompt": "w5 w6", "max_tokens": 3, "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == 3
        assert asked("/status")["generated_tokens"] == 3
        container.stop(timeout=30)
        container.reload()
        assert container.attrs["State"]["ExitCode"] in (0, 143), container.logs().decode()[-2000:]
        assert b"Traceback" not in container.logs()
    finally:
        container.remove(force=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
