"""The run directory survives what a run meets: kills, full disks, other harnesses, other versions."""

import dataclasses
import errno
import json
import os
from pathlib import Path

import pytest

from harness.api import SCHEMA_VERSION, HarnessError, RequestTrace, RunRecord, parse_record, to_json
from harness.run import store as store_module
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
    store.close()
    store.path.write_bytes(b"\n" + store.path.read_bytes() + b"  \n")
    store.open()
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


def test_a_record_that_nobody_could_read_again_is_an_error_that_can_be_read(store, monkeypatch):
    """And those beside it stay readable."""
    store.append(record(0))
    whole = record(1)
    monkeypatch.setattr(store_module, "MAX_BYTES", len(json.dumps(to_json(whole))) - 400)
    store.append(dataclasses.replace(whole, requests=(RequestTrace("r", 1, 1, 0, 0.0, (1.0,) * 300, "length", ""),)))
    first, second = store.records()
    assert (first.status, second.status) == ("ok", "error") and "MiB" in second.reason
    assert not second.requests and not is_done(second, SPEC)


def test_what_a_power_cut_leaves_of_a_last_line_is_cut(store):
    store.append(record(0))
    store.close()
    with store.path.open("ab") as file:
        file.write(b'{"spec": ' + bytes(5000))  # the size outlived the cut, the data did not
    store.open()
    store.append(record(1))
    assert [r.repeat for r in store.records()] == [0, 1]


def test_the_name_of_a_new_file_is_synced_and_that_of_an_old_one_is_not(store, monkeypatch):
    synced = []
    monkeypatch.setattr("harness.common.line_file.sync_folder", synced.append)
    for repeat in range(3):
        store.append(record(repeat))
    assert synced == [store.out]


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


def of_cell(name, repeat):
    spec = dataclasses.replace(SPEC, name=name, seed=len(name))
    return RunRecord(spec, spec.fingerprint(), repeat, "ok")


def test_records_of_some_cells_are_set_aside_and_the_others_stay(store):
    for name, repeat in (("a", 0), ("bb", 0), ("a", 1), ("bb", 1)):
        store.append(of_cell(name, repeat))
    changed = dataclasses.replace(of_cell("a", 0).spec, seed=77)
    store.set_aside([changed])  # by name, as the suite may have changed since
    store.append(of_cell("a", 0))
    assert [(r.spec.name, r.repeat) for r in store.records()] == [("bb", 0), ("bb", 1), ("a", 0)]
    aside = (store.out / "records.1.jsonl").read_bytes().splitlines()
    assert [(r.spec.name, r.repeat) for r in (parse_record(line, "") for line in aside)] == [("a", 0), ("a", 1)]
    store.set_aside([dataclasses.replace(changed, name="other")])
    assert not (store.out / "records.2.jsonl").exists(), "nothing of such a cell"


@pytest.mark.parametrize("whole", [0, 1])
def test_setting_aside_that_is_interrupted_loses_no_record(store, monkeypatch, whole):
    """Before the file of the moved records is there, and before the other's place is taken."""
    for name in ("a", "bb"):
        store.append(of_cell(name, 0))
    replaced = []
    replace = Path.replace

    def killed(*args):
        if len(replaced) == whole:
            raise KeyboardInterrupt
        replaced.append(replace(*args))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        store.set_aside([of_cell("a", 0).spec])
    assert [r.spec.name for r in store.records()] == ["a", "bb"]
    assert not [path.name for path in store.out.iterdir() if path.name.startswith(".records")]


@pytest.mark.parametrize("others", [b'{"torn', b"a whole line\n"])
def test_nothing_is_appended_to_a_file_that_somebody_else_has_changed(store, others):
    store.append(record(0))
    with store.path.open("ab") as file:
        file.write(others)
    before = store.path.read_bytes()
    with pytest.raises(HarnessError, match="changed by another program"):
        store.append(record(1))
    assert store.path.read_bytes() == before
    store.close()
    store.path.write_bytes(before.removesuffix(b"a whole line\n"))
    store.open()
    store.append(record(1))
    assert [r.repeat for r in store.records()] == [0, 1]


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


def test_a_record_is_on_the_disk_when_it_is_acknowledged(store, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino) or sync(descriptor))
    store.append(record(0))
    assert {store.path.stat().st_ino, store.out.stat().st_ino} <= set(synced), "the file, and its name"
    synced.clear()
    store.append(record(1))
    assert synced == [store.path.stat().st_ino]
