"""The cache folder: what is known in it, what goes, what stays, and what is found damaged."""

import fcntl
import os
import sys
import time
from pathlib import Path

import pytest

from engines.common.folders import build_once
from engines.models import checkpoints
from engines.offload.weights import manifest
from harness.api import HarnessError, ModelSpec
from harness.cache.clean import KNOWN, Choice, chosen, remove
from harness.cache.entries import entries
from harness.cache.verify import verify
from harness.common.files import default_cache, replacing
from harness.common.locks import in_use

ENVIRONMENT = "environments/offload-0123456789ab"
WEIGHTS, KERNEL = "offload/opt-0123456789abcdef", "kernels/panels-0123456789abcdef"
USAGE = "expert_usage-0123456789abcdef.json"
OTHERS = ("mine.txt", "models/mine", "vllm/mine", "work/mine")  # of somebody else, in places that look like ours
REPLACING = {".contents.json.77", ".max_batch.json.0a1b2c3d.77.tmp"}  # as earlier versions named them, and this one
LEFT = {"models/opt-1.tmp-77", "harness-job-x1", "work/0123456789ab", "environments/vllm-77", *REPLACING}


def build(cache, name, *files):
    def write(folder):
        for file in files:
            (folder / file).write_bytes(b"x" * 1000)
        if name.startswith("offload/"):
            manifest.write(folder, manifest.LAYOUT, manifest.QUANTIZER)

    return build_once(cache / name, name, 0, write)


@pytest.fixture
def cache(tmp_path):
    """One of each, as those who write there leave it."""
    cache = tmp_path / "cache"
    checkpoints.prepare(ModelSpec("tiny/opt", "dummy", "float32"), cache)
    build(cache, WEIGHTS, "layers.0", "small.safetensors")
    build(cache, KERNEL, "kernel.so")
    home = cache / ENVIRONMENT
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").symlink_to(sys.executable)
    (home / ".ready").write_text("Python\n")
    (cache / "environments" / "vllm-77").mkdir()  # as a killed build leaves it
    for name in (ENVIRONMENT, "environments/vllm-77"):
        (cache / f"{name}.lock").touch()
    for name in ("models/opt-1.tmp-77", "harness-job-x1", "work/0123456789ab", *OTHERS[1:]):
        (cache / name).mkdir(parents=True)
        (cache / name / "file").write_text("12345")
    for name in ("contents.json", "max_batch.json", USAGE, *REPLACING):
        (cache / name).write_text("{}")
    (cache / "mine.txt").write_text("of somebody else")
    return cache


def by_name(cache):
    return {entry.name: entry for entry in entries(cache)}


def model_name(cache):
    return next(name for name, entry in by_name(cache).items() if entry.kind == "models" and not entry.state)


def test_everything_is_listed_once_with_its_kind_and_size(cache):
    found = by_name(cache)
    kinds = {name: entry.kind for name, entry in found.items()}
    assert kinds[WEIGHTS] == "weights" and kinds[KERNEL] == "kernels" and kinds[ENVIRONMENT] == "environments"
    assert {name for name, kind in kinds.items() if kind == "other"} == set(OTHERS)
    assert {name for name, kind in kinds.items() if kind == "choices"} == {
        "contents.json", "max_batch.json", USAGE, *REPLACING
    }  # fmt: skip
    assert {name for name, entry in found.items() if entry.state == "leftover"} == LEFT
    assert found[KERNEL].size == 1000 and found[WEIGHTS].size > 2000
    assert abs(found[KERNEL].used - time.time()) < 3600
    assert len(found) == len(LEFT) + len(OTHERS) + 7


def test_only_leftovers_go_unless_something_is_chosen(cache):
    assert {entry.name for entry in chosen(entries(cache), Choice())} == LEFT
    remove(cache, chosen(entries(cache), Choice()), pytest.fail)
    assert not LEFT & by_name(cache).keys()
    assert {*OTHERS, WEIGHTS, KERNEL, ENVIRONMENT} <= by_name(cache).keys()


def test_all_leaves_what_the_harness_did_not_make(cache):
    freed = remove(cache, chosen(entries(cache), Choice(kinds=KNOWN)), pytest.fail)
    assert by_name(cache).keys() == set(OTHERS)
    assert freed > 3000
    build(cache, KERNEL, "kernel.so")  # can be made again
    assert KERNEL in by_name(cache)


def test_kinds_names_and_last_use_choose(cache):
    def going(**options):
        return {entry.name for entry in chosen(entries(cache), Choice(**options))} - LEFT

    assert going(kinds=("kernels", "weights")) == {KERNEL, WEIGHTS}
    assert going(names=(KERNEL, "contents.json")) == {KERNEL, "contents.json"}
    old = time.time() - 40 * 86400
    os.utime(cache / KERNEL / "kernel.so", (old, old))
    os.utime(cache / KERNEL, (old, old))
    assert going(before=time.time() - 30 * 86400) == {KERNEL}
    assert going(before=time.time() - 30 * 86400, kinds=("weights",)) == set()
    with pytest.raises(HarnessError, match="did you mean"):
        going(names=(KERNEL[:-1],))
    with pytest.raises(HarnessError, match="not made by the harness"):
        going(names=("mine.txt",))


def test_weights_and_environments_that_nothing_reads_are_outdated(cache):
    assert by_name(cache)[ENVIRONMENT].state == "outdated", "no pins have this hash"
    assert by_name(cache)[WEIGHTS].state == ""
    (cache / WEIGHTS / "manifest.json").unlink()
    manifest.write(cache / WEIGHTS, manifest.LAYOUT, manifest.QUANTIZER - 1)
    outdated = chosen(entries(cache), Choice(outdated=True))
    assert {entry.name for entry in outdated} - LEFT == {WEIGHTS, ENVIRONMENT}


def test_what_is_used_or_built_stays(cache):
    going = chosen(entries(cache), Choice(kinds=("kernels",)))
    with in_use(cache):
        assert {e.name for e in entries(cache) if e.state == "in use"} == LEFT, "they may be those of the run"
        assert not [e for e in chosen(entries(cache), Choice()) if e.state]
        with pytest.raises(HarnessError, match="in use by a run or a job"):
            remove(cache, going, pytest.fail)
    kept = []
    with (cache / f"{KERNEL}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove(cache, going, kept.append)
    assert kept == [f"{KERNEL} is being built: kept"]
    assert KERNEL in by_name(cache) and not LEFT & by_name(cache).keys()


def test_a_removal_that_is_killed_leaves_nothing_that_looks_complete(cache, monkeypatch):
    def killed(path):
        raise KeyboardInterrupt

    going = [entry for entry in entries(cache) if entry.name == WEIGHTS]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.rmtree", killed)
        remove(cache, going, pytest.fail)
    (left,) = [e for e in entries(cache) if e.name.startswith(WEIGHTS)]
    assert left.state == "leftover" and left.name != WEIGHTS


def damaged(cache):
    return {result.entry.name for result in verify(entries(cache)) if result.problem}


def test_what_is_whole_is_found_so(cache):
    assert damaged(cache) == set()
    unknown = {result.entry.name for result in verify(entries(cache)) if result.problem is None}
    assert unknown == set(OTHERS)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def test_each_damage_is_found(cache):
    model = model_name(cache)
    cut(next((cache / model).glob("*.safetensors")))
    cut(cache / WEIGHTS / "layers.0")
    (cache / KERNEL / "kernel.so").write_bytes(b"")
    (cache / ENVIRONMENT / "bin" / "python").unlink()
    (cache / "contents.json").write_text("{")
    (cache / "max_batch.json").write_text("[]")
    assert damaged(cache) == {model, WEIGHTS, KERNEL, ENVIRONMENT, "contents.json", "max_batch.json"}
    (cache / WEIGHTS / "manifest.json").write_text("{")
    assert WEIGHTS in damaged(cache)
    (cache / WEIGHTS / "manifest.json").unlink()  # converted before there were manifests
    assert WEIGHTS not in damaged(cache)


def test_an_empty_or_missing_cache_is_no_error(tmp_path):
    assert entries(tmp_path / "none") == [] and entries(tmp_path) == []


def test_a_file_that_is_being_replaced_is_known(tmp_path):
    with replacing(tmp_path / "gemm_choices.json") as file:
        (entry,) = entries(tmp_path)
        assert (entry.kind, entry.state, entry.path) == ("choices", "leftover", Path(file.name))


def test_the_cache_is_where_the_user_says_else_where_the_desktop_does_else_below_home(monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_cache() == Path("/own")
    monkeypatch.setenv("HARNESS_CACHE", "")
    assert default_cache() == Path("/xdg/offload-harness")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path("/home/me/.cache/offload-harness")
