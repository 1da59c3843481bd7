"""The run directory survives what a run meets: kills, full disks, other harnesses, other versions."""

import dataclasses
import errno
import json
import os

import pytest

from harness.api import SCHEMA_VERSION, HarnessError, RunRecord, parse_record, to_json
from harness.run.store import Store, is_done
from tests.records import FAKE

SPEC = dataclasses.replace(FAKE, name="cell")


def record(repeat=0, status="ok"):
    return RunRecord(SPEC, SPEC.fingerprint(), repeat, status)


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "out")
    made.open()
    yield made
    made.close()


def test_records_come_back_in_order(store):
    for i in range(3):
        store.append(record(i))
    assert [r.repeat for r in store.records()] == [0, 1, 2]
    assert store.latest().keys() == {(SPEC.fingerprint(), i) for i in range(3)}


@pytest.mark.parametrize(("cut", "left"), [(1, [0, 1, 2]), (2, [0, 2]), (10, [0, 2]), (100, [0, 2])])
def test_a_truncated_last_line_is_cut_and_nothing_else_is_lost(store, cut, left):
    """A whole record that lacks only the end of its line is none that was cut."""
    store.append(record(0))
    store.append(record(1))
    store.close()
    store.path.write_bytes(store.path.read_bytes()[:-cut])
    store.open()
    store.append(record(2))
    assert [r.repeat for r in store.records()] == left


def test_blank_lines_are_passed_over(store):
    store.append(record(0))
    store.path.write_bytes(b"\n" + store.path.read_bytes() + b"  \n")
    store.append(record(1))
    assert [r.repeat for r in store.records()] == [0, 1]


@pytest.mark.parametrize(
    ("status", "expect", "done"),
    [
        ("ok", "ok", True),
        ("oom_host", "ok", True),
        ("infeasible", "ok", True),
        ("interrupted", "ok", False),
        ("interrupted", "interrupted", False),
        ("disk_full", "ok", False),
        ("error", "ok", False),
        ("error", "error", True),
        ("timeout", "ok", True),
    ],
)
def test_which_records_count_as_done(status, expect, done):
    asked = dataclasses.replace(SPEC, expect=expect)
    assert is_done(record(0, status), asked) is done
    with_more_time = dataclasses.replace(asked, timeout_s=SPEC.timeout_s + 1)
    assert is_done(record(0, status), with_more_time) is (done and status != "timeout")


def test_a_full_disk_leaves_no_half_record(store, monkeypatch):
    store.append(record(0))
    size = store.path.stat().st_size

    def half(descriptor, data):
        os.write(descriptor, bytes(data[: len(data) // 2]))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("harness.common.line_file._write_all", half)
    with pytest.raises(HarnessError, match="No space left"):
        store.append(record(1))
    assert store.path.stat().st_size == size


def test_two_harnesses_do_not_share_a_directory(store):
    with pytest.raises(HarnessError, match="in use by another harness"):
        Store(store.out).open()


def test_fresh_sets_records_aside(store):
    store.append(record(0))
    store.close()
    for number in (1, 2):
        store.open(fresh=True)
        assert not list(store.records())
        store.append(record(number))
        store.close()
    names = sorted(p.name for p in store.out.glob("records*.jsonl"))
    assert names == ["records.1.jsonl", "records.2.jsonl", "records.jsonl"]


def test_an_unwritable_place_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match="choose another folder with --out"):
        Store(tmp_path / "file" / "out").open()


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1, None, "1", True])
def test_other_schemas_are_refused_by_version(version):
    line = json.dumps(to_json(record()) | {"schema_version": version}).encode()
    with pytest.raises(HarnessError, match=r"f:1: .*schema_version"):
        parse_record(line, "f:1")


@pytest.mark.parametrize("line", [b"{", b"[]", b"\xff", b"null", b'{"schema_version":1}'])
def test_damage_names_the_line(line):
    with pytest.raises(HarnessError, match="f:7"):
        parse_record(line, "f:7")
