"""Scratch folders and half-written files: their own process removes them, or the next where it was killed."""

import errno
import subprocess
import sys

import pytest

from harness.common import files
from harness.common.files import replace_with
from harness.common.locks import locked
from harness.common.scratch import remove_abandoned, scratch_folder

KILLED = """
import os, signal, sys
from pathlib import Path
from harness.common.scratch import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "big").write_text("data")
    os.kill(os.getpid(), signal.SIGKILL)
"""
#: No process has this id: it is above the kernel's limit.
NOBODY = 1 << 22


def scratch(cache):
    return list((cache / "work").iterdir())


@pytest.mark.parametrize("name", ["", "mine"])
def test_a_scratch_folder_is_empty_and_goes_in_the_end(tmp_path, name):
    (tmp_path / "work" / "mine").mkdir(parents=True)
    (tmp_path / "work" / "mine" / "old").write_text("")
    with scratch_folder(tmp_path, name) as folder:
        assert list(folder.iterdir()) == []
        assert name in ("", folder.name)
        (folder / "x").write_text("")
    assert scratch(tmp_path) == []


def test_the_folder_of_a_killed_process_goes_with_the_next_and_that_of_a_living_one_stays(tmp_path):
    with scratch_folder(tmp_path) as mine:
        subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
        assert len(scratch(tmp_path)) == 2
        with scratch_folder(tmp_path) as other:
            assert set(scratch(tmp_path)) == {mine, other}


def test_abandoned_folders_can_be_removed_without_a_new_one(tmp_path):
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    remove_abandoned(tmp_path)
    assert scratch(tmp_path) == []


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path):
    left, alive, foreign = (tmp_path / f".a.json.{name}.tmp" for name in (NOBODY, 1, "notes"))
    for path in (left, alive, foreign):
        path.write_text("half")
    replace_with(tmp_path / "a.json", "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([alive.name, foreign.name, "a.json"])


def test_what_a_killed_writer_left_in_a_cache_goes_also_where_nobody_writes_that_file_again(tmp_path):
    left, alive, foreign = (tmp_path / f".{name}.tmp" for name in (f"a.json.{NOBODY}", "b.json.1", "notes.of.mine"))
    for path in (left, alive, foreign, tmp_path / "a.json"):
        path.write_text("half")
    remove_abandoned(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([alive.name, foreign.name, "a.json"])


def test_a_file_that_a_process_of_another_container_writes_stays(tmp_path):
    theirs = tmp_path / f".a.json.{NOBODY}.tmp"
    with locked(theirs, ""):
        replace_with(tmp_path / "a.json", "whole")
        assert theirs.exists()


def test_content_is_on_the_disk_before_it_takes_the_place_of_the_old(tmp_path, monkeypatch):
    path, order = tmp_path / "a.json", []
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: order.append(path.exists()))
    replace_with(path, "whole")
    assert order == [False]


def test_a_folder_that_a_killed_process_left_is_emptied_where_there_are_no_locks(tmp_path, monkeypatch):
    def none(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / "work" / "mine").mkdir(parents=True)
    (tmp_path / "work" / "mine" / "old").touch()
    monkeypatch.setattr("fcntl.flock", none)
    with scratch_folder(tmp_path, "mine") as folder:
        assert folder == tmp_path / "work" / "mine" and not list(folder.iterdir())
    assert not list((tmp_path / "work").iterdir())
