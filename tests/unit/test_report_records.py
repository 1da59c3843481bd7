"""What reports read, and where they write: damaged, odd and newer records, and places that cannot be."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.api import HarnessError, to_json
from reports.build import build, load_records
from reports.records import read_runs
from reports.render import write as write_file
from tests.records import PROVENANCE, cell, record, write


def test_a_truncated_last_line_is_left_out_with_a_note(tmp_path):
    line = json.dumps(to_json(record(cell(), 1)))
    runs = read_runs([write(tmp_path, [record(cell())], tail=line[: len(line) // 2])])
    assert len(runs.records) == 1
    assert "incomplete" in runs.notes[0]


def test_damage_elsewhere_is_an_error(tmp_path):
    path = write(tmp_path, [record(cell())], tail="{broken\n") / "records.jsonl"
    with pytest.raises(HarnessError, match=f"^{re.escape(str(path))}:2: not JSON"):
        load_records([tmp_path])


def test_the_last_of_duplicates_wins(tmp_path):
    one, two = write(tmp_path / "1", [record(cell(), 0, 1.0)]), write(tmp_path / "2", [record(cell(), 0, 3.0)])
    runs = read_runs([one, two])
    assert [r.metrics["generation_throughput_tok_s"] for r in runs.records] == [3.0]
    assert "1 of 2 records" in runs.notes[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no records.jsonl"),
        ("", "holds no complete record"),
        ('{"spec": {"en', "holds no complete record"),
        ('{"schema_version": 3, "new": 1}\n', "schema_version 3 is newer than 2"),
        ("[1]\n", "not a record"),
        ("{}\n", "not a record"),
        ('{"schema_version": 2}\n', "field 'spec' is missing"),
        ("[" * 100_000 + "\n1\n", "not JSON"),
        ('{"schema_version": 2, "wall_s": NaN}\n', "NaN is no number"),
    ],
)
def test_unreadable_records_are_one_clear_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "records.jsonl").write_text(content)
    with pytest.raises(HarnessError, match=message) as caught:
        load_records([tmp_path])
    assert "\n" not in str(caught.value)


def test_a_name_that_is_none_and_a_link_in_a_circle(tmp_path):
    (tmp_path / "records.jsonl").symlink_to(tmp_path / "records.jsonl")
    for folder in (tmp_path, Path("a" * 300)):
        with pytest.raises(HarnessError, match="cannot read"):
            load_records([folder])


@pytest.mark.parametrize("speed", [0.0, -1.0, 1e300])
def test_a_speed_that_is_none_ranks_nothing(tmp_path, speed):
    odd = replace(record(cell("odd", seed=3)), metrics={"generation_throughput_tok_s": speed})
    other = {**PROVENANCE, "machine": {"ram_bytes": 10**400}, "git": "none"}
    build([write(tmp_path, [odd, record(cell(), provenance=other), record(cell("b", "offload", seed=1))])])
    assert "odd" in (tmp_path / "report.html").read_text()


def test_a_target_that_is_a_folder(tmp_path):
    with pytest.raises(HarnessError, match="it is a folder"):
        write_file(tmp_path, "text")
    with pytest.raises(HarnessError, match="it is a folder"):
        write_file(Path(), "text")


def test_no_directory():
    with pytest.raises(HarnessError, match="no run directory"):
        load_records([])


def test_a_damaged_suite_file_is_only_noted(tmp_path):
    write(tmp_path, [record(cell())])
    (tmp_path / "suite.yaml").write_text("description: [unclosed\n")
    assert "cannot be read" in read_runs([tmp_path]).notes[0]


@pytest.mark.parametrize("out", ["a" * 300, "folder/" + "a" * 300 + ".html"])
def test_a_name_longer_than_a_file_system_takes(tmp_path, out):
    run = write(tmp_path / "run", [record(cell())])
    with pytest.raises(HarnessError, match=r"^cannot write .*choose another place with --out$"):
        build([run], tmp_path / out)
