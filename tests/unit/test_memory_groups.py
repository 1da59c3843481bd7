"""Memory caps: real cgroup v1 or the monitor where they can be made; v2 against a copy of its file layout."""

import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from harness.common import host_memory
from harness.common.rank_groups import in_own_group
from harness.launchers import memory
from harness.launchers.memory import Cgroup, Monitor, RankGroups, make_group

EAT = "import sys; b = bytearray(int(sys.argv[1])); b[::4096] = b'x' * len(b[::4096]); print('done')"


def run_in(group, size):
    command = group.wrap([sys.executable, "-c", EAT, str(size)])
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    group.adopt(process.pid)
    return process.wait()


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(params=["best", "monitor"])
def make(request):
    made = []

    def factory(limit):
        group = make_group(limit) if request.param == "best" else Monitor(limit)
        made.append(group)
        return group

    yield factory
    for group in made:
        group.close()


def test_a_process_above_its_limit_is_killed_with_evidence(make):
    group = make(150 << 20)
    assert run_in(group, 1 << 30) != 0
    assert group.oom_kills() == 1


def test_a_process_within_its_limit_is_left_alone(make):
    group = make(400 << 20)
    assert run_in(group, 64 << 20) == 0
    assert group.oom_kills() == 0
    assert group.peak_bytes() > (0 if group.method == "monitor" else 64 << 20)


def test_each_rank_has_a_limit_of_its_own(monkeypatch):
    group = make_group(300 << 20, ranks=2)
    if not isinstance(group, RankGroups):
        pytest.skip("no writable memory cgroup here")
    with closing(group):
        for name, value in group.env.items():
            monkeypatch.setenv(name, value)

        def eat(rank, size):
            command = in_own_group(rank, [sys.executable, "-c", EAT, str(size)])
            return subprocess.call(command, stdout=subprocess.DEVNULL)

        assert run_in(group, 90 << 20) == eat(1, 90 << 20) == 0
        assert group.peak_bytes() > 180 << 20, "of both"
        assert group.oom_kills() == 0
        assert eat(1, 200 << 20) != 0, "though all together have more"
        assert group.oom_kills() == 1
        assert eat(2, 200 << 20) == 0, "a rank that has none"


def test_kill_ends_grandchildren_in_other_sessions(make, tmp_path):
    group = make(None)
    child = tmp_path / "child"
    script = (
        "import pathlib, subprocess, time; p = subprocess.Popen(['sleep', '600'], start_new_session=True);"
        f"pathlib.Path({str(child)!r}).write_text(str(p.pid)); time.sleep(600)"
    )
    process = subprocess.Popen(group.wrap([sys.executable, "-c", script]), start_new_session=True)
    group.adopt(process.pid)
    while not child.exists() or not child.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(1.0)  # the monitor looks now and then
    process.kill()  # the worker dies first, as it does when its time is over
    process.wait(timeout=10)
    group.kill()
    deadline = time.monotonic() + 10  # a kill is sent at once and takes effect a moment later
    while alive(int(child.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_page_cache_counts_where_the_group_says_so(tmp_path):
    group = make_group(100 << 20)
    if not group.counts_page_cache:
        group.close()
        pytest.skip("no writable memory cgroup here")
    file = tmp_path / "file"
    try:
        script = f"open({str(file)!r}, 'wb').write(bytes(60 << 20))"
        subprocess.run(group.wrap([sys.executable, "-c", script]), check=True)
        assert 60 << 20 < group.peak_bytes() <= 100 << 20
    finally:
        group.close()
    assert not group.path.exists()


@pytest.fixture
def v2_tree(tmp_path, monkeypatch):
    """The files of a v2 hierarchy in which this process lives in /slice/scope; the kernel is not behind them."""
    own = tmp_path / "fs" / "slice" / "scope"
    own.mkdir(parents=True)
    for folder in (own, own.parent, tmp_path / "fs"):
        (folder / "cgroup.controllers").write_text("memory\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/slice/scope\n")
    monkeypatch.setattr(host_memory, "CGROUP_ROOT", tmp_path / "fs")
    monkeypatch.setattr(host_memory, "PROC", tmp_path)
    return own


def test_v2_without_delegation_falls_back_to_the_monitor_and_leaves_nothing(v2_tree):
    assert make_group(1 << 20).method == "monitor"
    assert [p.name for p in v2_tree.parent.parent.rglob("harness-*")] == []


def test_v2_sets_limit_swap_and_group_kill(v2_tree, monkeypatch):
    mkdir = Path.mkdir

    def kernel(path):
        mkdir(path)
        if path.parent.name == "slice":  # only the parent has delegated the controller
            for name in ("memory.max", "memory.swap.max", "memory.oom.group"):
                (path / name).write_text("")
            (path / "memory.events").write_text("low 0\noom 1\noom_kill 3\n")
            (path / "memory.peak").write_text("8192\n")

    monkeypatch.setattr(Path, "mkdir", kernel)
    group = make_group(123456)
    assert group.method == "cgroup-v2"
    assert group.path.parent.name == "slice"
    assert (group.path / "memory.max").read_text() == "123456"
    assert (group.path / "memory.swap.max").read_text() == "0"
    assert (group.path / "memory.oom.group").read_text() == "1"
    assert (group.oom_kills(), group.peak_bytes()) == (3, 8192)
    shutil.rmtree(group.path)
    assert (group.oom_kills(), group.peak_bytes()) == (3, 8192), "known although the group is gone"


def test_the_tightest_limit_above_a_process_is_its_own(v2_tree):
    assert host_memory.own_limit() is None
    (v2_tree / "memory.max").write_text("max\n")
    assert host_memory.own_limit() is None
    (v2_tree.parent / "memory.max").write_text("1048576\n")
    assert host_memory.own_limit() == host_memory.free_memory() == 1 << 20
    (v2_tree.parent / "memory.current").write_text("700000\n")  # a neighbour's in the same container, too
    (v2_tree.parent / "memory.stat").write_text("anon 600000\ninactive_file 90000\nactive_file 10000\n")
    assert host_memory.own_limit() == 1 << 20
    assert host_memory.free_memory() == (1 << 20) - 700_000 + 90_000
    (v2_tree.parent / "memory.current").write_text("9000000\n")
    assert host_memory.free_memory() == 0


def test_limits_of_the_first_version_are_found_beside_groups_of_the_second(tmp_path, monkeypatch):
    own = tmp_path / "fs" / "memory" / "job"
    own.mkdir(parents=True)
    (own / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("4:cpu,memory:/job\n3:pids:/job\n0::/\n")
    monkeypatch.setattr(host_memory, "CGROUP_ROOT", tmp_path / "fs")
    monkeypatch.setattr(host_memory, "PROC", tmp_path)
    assert host_memory.own_limit() is None
    (own.parent / "memory.limit_in_bytes").write_text("4096\n")
    assert host_memory.own_limit() == 4096


def test_groups_of_dead_harnesses_are_swept(monkeypatch):
    group = make_group(None)
    if not isinstance(group, Cgroup):
        pytest.skip("no writable memory cgroup here")
    dead = subprocess.Popen(["true"])
    dead.wait()
    stale = group.path.parent / f"harness-{dead.pid}-1"
    stale.mkdir()
    try:
        memory.sweep_stale_groups()
        assert not stale.exists()
        assert group.path.exists()
    finally:
        group.close()


def test_what_a_group_of_the_first_version_uses_is_not_free(tmp_path, monkeypatch):
    own = tmp_path / "fs" / "memory" / "job"
    own.mkdir(parents=True)
    (own / "memory.limit_in_bytes").write_text("1048576\n")
    (own / "memory.usage_in_bytes").write_text("700000\n")
    (own / "memory.stat").write_text("inactive_file 5\ntotal_inactive_file 90000\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("4:cpu,memory:/job\n")
    monkeypatch.setattr(host_memory, "CGROUP_ROOT", tmp_path / "fs")
    monkeypatch.setattr(host_memory, "PROC", tmp_path)
    assert host_memory.free_memory() == (1 << 20) - 700_000 + 90_000
