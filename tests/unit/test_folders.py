"""Folders that are built once: what killed builders leave is cleared away, what living ones make is not."""

import fcntl
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError

from engines.common.folders import build_once
from engines.models import shards
from harness.api import DiskFullError, HarnessError


def write(folder):
    (folder / "x").write_text("whole")


def test_leftovers_of_any_killed_builder_go(tmp_path):
    (tmp_path / "other.tmp-1").mkdir()
    (tmp_path / "other.tmp-1" / "x").write_text("ha")
    assert (build_once(tmp_path / "mine", "it", 1, write) / "x").read_text() == "whole"
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["mine"]


def test_leftovers_go_also_where_nothing_is_built(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "other.tmp-1").mkdir()
    build_once(tmp_path / "mine", "it", 1, write)
    assert not (tmp_path / "other.tmp-1").exists()


def test_the_unfinished_folder_of_a_living_builder_stays(tmp_path):
    (tmp_path / "other.tmp-1").mkdir()
    with (tmp_path / "other.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build_once(tmp_path / "mine", "it", 1, write)
        assert (tmp_path / "other.tmp-1").is_dir()


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def fail(folder):
        write(folder)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        build_once(tmp_path / "mine", "it", 1, fail)
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


def test_where_nothing_can_be_written_is_said_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match=r"cannot write .*; choose another cache"):
        build_once(tmp_path / "file" / "mine", "it", 1, write)


def test_a_disk_that_fills_under_safetensors_is_an_oserror(tmp_path, monkeypatch):
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(shards, "save_file", Mock(side_effect=full))
    with pytest.raises(DiskFullError):
        build_once(tmp_path / "mine", "it", 1, lambda folder: shards.write(folder, [{"x": torch.ones(1)}], print))
