"""What launchers decide before anything runs: paths in containers, environments by pins, images by labels."""

import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines.adapters.fake import MODEL
from engines.environments.__main__ import wanted
from harness import registry
from harness.api import Exchange, HarnessError, Outcome, RunCell, WorkerRequest, WorkerResult, WorkloadSpec, to_json
from harness.builtin import ENGINES
from harness.hardware import provenance
from harness.launchers import images, sandbox
from harness.launchers.launcher import CellLauncher, engine_env, judge_helper
from harness.launchers.process import ProcessSandbox
from harness.launchers.venv import VirtualEnvironments, install_steps, pip_environment
from harness.suite.config import load_cell
from tests.records import FAKE as SPEC

_ROOT = Path(__file__).parents[2]


def test_an_image_goes_with_a_container():
    cell = {"engine": "fake", "model": {"id": "fake"}, "workload": {}, "image": "mine"}
    with pytest.raises(HarnessError, match="launcher: docker"):
        load_cell(cell)
    assert load_cell(cell | {"launcher": "docker"}).image == "mine"


def test_every_environment_has_its_pins_and_is_built_torch_first():
    named = {entry.environment for entry in ENGINES.values()} | {"helm"}
    assert named == set(registry.environments())
    for name in sorted(named):
        pins = registry.environment_pins(name)
        lines = [line for line in pins.read_text().splitlines() if not line.startswith("#")]
        assert lines and wanted(name), name
        assert all("==" in line and "+" not in line for line in lines), name
        steps = install_steps(pins)
        assert ("torch" in {line.split("==")[0] for line in lines}) == any(w.startswith("torch==") for w in steps[0])


def test_triton_is_the_one_that_torch_requires():
    """Its CUDA build names one; which, no package that is installed here says."""
    of_torch = {"2.13.0": "3.7.1"}
    for pins in [_ROOT / "constraints.txt", *map(registry.environment_pins, registry.environments())]:
        found = dict(line.split("==") for line in pins.read_text().splitlines() if "==" in line and line[0] != "#")
        assert found.get("triton", of_torch.get(found.get("torch"))) == of_torch.get(found.get("torch")), pins.name


def test_an_environment_is_known_by_its_pins(tmp_path, monkeypatch):
    pins = tmp_path / "pins.txt"
    monkeypatch.setattr(registry, "environment_pins", lambda name: pins)
    pins.write_text("a==1\n")
    first = VirtualEnvironments.identity("offload")
    pins.write_text("a==2\n")
    assert first.startswith("offload-")
    assert VirtualEnvironments.identity("offload") != first
    assert not VirtualEnvironments(tmp_path).built("offload")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({}, "no worker of this harness"),
        ({images.ENVIRONMENT: "vllm", images.CODE: "x"}, "holds environment vllm"),
        ({images.ENVIRONMENT: "harness", images.CODE: "x"}, "holds other code"),
    ],
)
def test_an_image_that_cannot_run_this_cell_is_refused(labels, words):
    with pytest.raises(HarnessError, match=words):
        images.check(SimpleNamespace(labels=labels), "mine", SPEC)


def test_an_image_of_this_code_is_taken():
    labels = {images.ENVIRONMENT: "harness", images.CODE: images.code_digest()}
    images.check(SimpleNamespace(labels=labels), "mine", SPEC)


def test_requests_speak_of_a_container_s_paths(tmp_path):
    mounts = pytest.importorskip("harness.launchers.mounts")
    blobs, model = tmp_path / "hub: a, b" / "blobs", tmp_path / "hub: a, b" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    model.mkdir(parents=True)
    (blobs / "x").write_text("weights")
    (model / "model.safetensors").symlink_to("../../blobs/x")
    spec = replace(SPEC, workload=WorkloadSpec("trace", trace=str(tmp_path / "trace.csv")))
    work = RunCell(spec, replace(MODEL, path=str(model)), tmp_path, 0.0, tmp_path / "q" / "1.json")
    inside, mounted = mounts.translated(work, tmp_path / "work", tmp_path / "cache")
    assert inside.model.path == "/harness/model/1"
    assert inside.questions == Path("/harness/inputs/questions")
    assert inside.spec.workload.trace == "/harness/inputs/trace"
    assert str(tmp_path) not in json.dumps(to_json(inside))
    by_target = {m["Target"]: m for m in mounted}
    assert by_target["/harness/model/1/model.safetensors"]["Source"] == str(blobs / "x"), "a hub's files are links"
    assert {t for t, m in by_target.items() if not m["ReadOnly"]} == {"/harness/work", "/harness/cache"}
    assert work.cache == tmp_path, "the request itself is left as it is"
    assert work.spec.workload.trace == str(tmp_path / "trace.csv")


@pytest.mark.parametrize("kind", ["pipe", "link", "broken", "list"])
def test_a_result_that_is_not_the_worker_s_is_none(tmp_path, kind):
    """A container may leave anything in the folder that the harness reads."""
    path = tmp_path / "result.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "other").write_text("{}")
        path.symlink_to(tmp_path / "other")
    else:
        path.write_text({"broken": '{"status"', "list": "[]"}[kind])
    assert sandbox.read_result(tmp_path) is None
    (tmp_path / "events.jsonl").write_text('{"phase": "load", "done": 1, "total": 2}\nnonsense\n')
    request = WorkerRequest(RunCell(SPEC, MODEL, tmp_path, 0.0), Exchange(tmp_path, tmp_path / "log"), 1.0)
    assert not sandbox.watch(request, lambda: True)


def test_without_a_limit_of_device_memory_no_engine_sees_a_device():
    assert sandbox.settings(None, gpu=False, env={})["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in sandbox.settings(None, gpu=True, env={})


@pytest.mark.parametrize(("told", "code"), [(137, -9), (73, 73), (255, 255)])
def test_a_container_s_exit_code_is_a_signal_s_number_as_of_a_process(told, code):
    assert pytest.importorskip("harness.launchers.docker").exit_code(told) == code


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome(None, -9, timed_out=True), ("error", "no floor: not done after 5 s")),
        (Outcome(None, -9, oom_kills=1), ("error", "no floor: killed for want")),
        (Outcome(WorkerResult("unsupported", "why"), 0), ("unsupported", "why")),
    ],
)
def test_that_a_helper_took_too_much_says_nothing_about_the_cell(outcome, expected):
    refusal = judge_helper(outcome, 5.0, "no floor")
    assert refusal.status == expected[0] and refusal.reason.startswith(expected[1])


def test_who_may_live_is_not_declared_dead(monkeypatch):
    owners = pytest.importorskip("harness.launchers.owners")
    mine = os.getpid()
    began = owners.began(mine)
    assert owners.lives(mine, began)
    assert not owners.lives(mine, "another boot.1"), "its number is another's by now"
    monkeypatch.setattr(owners, "began", lambda pid: "")  # hidden from us
    assert owners.lives(mine, began)


def test_only_containers_whose_harness_is_known_to_be_gone_are_removed():
    owners = pytest.importorskip("harness.launchers.owners")
    dead = f"{2**22 + 1}@began"  # above the kernel's largest number
    removed = []

    def container(name, owner):
        return SimpleNamespace(name=name, labels={owners.OWNER: owner}, remove=lambda force: removed.append(name))

    known = [
        container("gone", f"{owners.place()}/{dead}"),
        container("elsewhere", f"{platform.node()}/pid:[1]/{dead}"),
        container("mine", owners.owner()),
    ]
    client = SimpleNamespace(containers=SimpleNamespace(list=lambda **_: known))
    owners.remove_abandoned(client)
    assert removed == ["gone"]


@pytest.mark.parametrize(("visible", "asked"), [("0,2", ["0", "2"]), ("", [])])
def test_a_container_sees_the_devices_that_a_process_would(monkeypatch, visible, asked):
    docker = pytest.importorskip("harness.launchers.docker")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = docker.devices()
    assert (found["DeviceIDs"] or []) == asked and found["Count"] == (0 if asked else -1)


def test_pip_looks_nowhere_else(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "here")
    found = pip_environment()
    assert "PYTHONPATH" not in found and "PIP_TARGET" not in found and found["PIP_INDEX_URL"] == "here"


def test_settings_that_reach_an_engine_are_told_but_for_those_that_the_cell_decides(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert provenance.settings()["OMP_NUM_THREADS"] == "1"
    assert "HOME" not in provenance.settings()
    launcher, process = CellLauncher(tmp_path, {}), ProcessSandbox()
    inherited = launcher.inherited(SPEC, process)
    assert "CUDA_VISIBLE_DEVICES" not in inherited and "OMP_NUM_THREADS" in inherited
    limits = replace(SPEC.limits, threads=2)
    assert "OMP_NUM_THREADS" not in launcher.inherited(replace(SPEC, limits=limits), process)
    assert "OMP_NUM_THREADS" not in launcher.inherited(replace(SPEC, env={"OMP_NUM_THREADS": "3"}), process)


def test_a_worker_runs_the_code_that_starts_it(monkeypatch, tmp_path):
    """Not that of another checkout, which is installed here."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    log = tmp_path / "log"
    request = SimpleNamespace(threads=None, gpu=False, env={}, exchange=SimpleNamespace(log=log))
    told = "import harness, sys; print(harness.__file__); print('/elsewhere' in sys.path)"
    assert ProcessSandbox()._start(request, [sys.executable, "-P", "-c", told], {}).wait() == 0
    assert log.read_text().splitlines() == [str(_ROOT / "harness" / "__init__.py"), "True"]


def test_a_process_has_the_variables_of_its_engine_and_of_its_cell(monkeypatch):
    """A cell's win over its engine's, and both over the user's."""
    monkeypatch.setenv("GOMP_SPINCOUNT", "1")
    cell = replace(SPEC, engine="offload", env={"GOMP_SPINCOUNT": "7"})
    assert engine_env(cell) == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "7"}
    assert engine_env(replace(cell, env={"OMP_WAIT_POLICY": "ACTIVE"})) == {"OMP_WAIT_POLICY": "ACTIVE"}
    assert sandbox.settings(2, gpu=False, env={"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "1"


def test_a_model_file_that_a_containers_user_cannot_read_is_named(tmp_path):
    mounts = pytest.importorskip("harness.launchers.mounts")

    for name, mode in (("config.json", 0o644), ("model.safetensors", 0o600)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "nowhere").symlink_to("gone")
    work = RunCell(SPEC, replace(MODEL, path=str(tmp_path)), tmp_path, 0.0)
    mine = (tmp_path / "config.json").stat()
    assert mounts.unreadable(work, mine.st_uid + 1, mine.st_gid + 1) == "model.safetensors"
    assert mounts.unreadable(work, mine.st_uid, mine.st_gid) == ""
