"""Locks between processes: nobody waits in silence, and who holds one is named."""

import fcntl
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from harness.api import HarnessError
from harness.common import locks
from harness.common.locks import locked, unused, waiting, waits

HOLDS = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def held(path):
    """Another process that holds the lock of a file or folder."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDS, path], **pipes) as process:  # its end closes the pipes
        process.stdout.readline()
        yield process


@pytest.fixture
def told(monkeypatch):
    """What a wait says; it says it at once."""
    said = []
    monkeypatch.setattr(locks, "_PATIENCE_S", 0.0)
    reset = waits.set(said.append)
    yield said
    waits.reset(reset)


def test_a_wait_says_what_it_is_for_and_who_holds_the_lock(tmp_path, told):
    path = tmp_path / "x.lock"
    path.touch()
    with held(path) as other:
        waits.set(lambda text: (told.append(text), other.stdin.close()))  # it lets go once it is waited for
        with waiting(path, "the kernel to be written"):
            pass
    assert told == [f"waiting for the kernel to be written ({path}), held by process {other.pid} (python)"]


def test_a_lock_that_is_free_is_taken_without_a_word(tmp_path, told):
    path = tmp_path / "x.lock"
    with waiting(path, "it"), pytest.raises(BlockingIOError), waiting(path, "it", fcntl.LOCK_NB):
        pytest.fail("it is held")
    assert not told


def test_a_refusal_names_the_holder(tmp_path):
    path = tmp_path / "x.lock"
    path.touch()
    with held(path) as other, pytest.raises(HarnessError, match=rf"^it is busy \(held by process {other.pid} "):
        locked(path, "it is busy")
    locked(path, "it is busy").close()
    with held(tmp_path) as other, pytest.raises(HarnessError, match=f"process {other.pid} "), unused(tmp_path):
        pytest.fail("it is held")


def test_a_file_system_without_locks_is_not_called_busy(tmp_path, monkeypatch):
    def none(*args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    with pytest.raises(OSError, match="No locks available"):
        locked(tmp_path / "x.lock", "it is busy")


def test_a_lock_is_not_looked_for_behind_a_link(tmp_path):
    target = tmp_path / "theirs"
    (tmp_path / "x.lock").symlink_to(target)
    for take in (lambda: locked(tmp_path / "x.lock", ""), waiting(tmp_path / "x.lock", "").__enter__):
        with pytest.raises(OSError, match="not a regular file but a link"):
            take()
    assert not os.path.lexists(target)
