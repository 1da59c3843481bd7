"""Records of somebody else: nothing is written where a name or a link says, and no format takes their markup."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.api import HarnessError, TraceEvent
from harness.common.files import MAX_SAFE_NAME, SAFE_NAME, inside, is_below, safe_name
from harness.run.store import Store
from reports.build import build
from reports.compare import compare_records
from reports.compare_formats import FORMATS
from reports.page import page
from reports.records import Runs, command_of, read_runs
from reports.render import html_of
from reports.timeline import chrome_trace
from reports.vega import Panel, library
from tests.records import assert_tables_are_whole, cell, failed, record, repeats, report, write

TRACE = (TraceEvent("w0", "load", 0.0, 4e5),)
#: Names that lead elsewhere, that no file can have, or that a shell or a listing takes for something else.
NAMES = ("../../x", "/etc/x", "a\0b", "x" * 5000, ".", "..", "", "-rf", ".hidden", "a\nb", "a\\b", "\ud800", "CON/../x")


def traced(name: str, **changes: object):
    return record(cell(name), trace=TRACE, **changes)


@pytest.mark.parametrize("name", NAMES)
def test_no_name_says_where_a_report_writes(name, tmp_path):
    spec = cell(name, suite=name, engine=name or "e")
    run = write(tmp_path / "a" / "run", [record(spec, trace=TRACE, log=name), failed(spec, "error", name, 1, log=name)])
    build([run])
    files = {path.relative_to(run) for path in tmp_path.rglob("*") if path.is_file()}
    (trace,) = (path for path in files if path.parent == Path("traces"))
    assert SAFE_NAME.fullmatch(trace.stem)
    assert {str(path) for path in files - {trace}} == {
        "records.jsonl", "report.html", "report.md", "report.csv", "report.xml"
    }  # fmt: skip


@pytest.mark.parametrize("fingerprint", ["/../../x", "../../..", "\0", "\ud800", "x" * 5000])
def test_no_fingerprint_says_where_a_report_writes(fingerprint, tmp_path):
    run = write(tmp_path / "run", [traced("same", fingerprint="f"), traced("same", fingerprint=fingerprint)])
    build([run])
    assert len([*(run / "traces").iterdir()]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_names_that_differ_in_case_or_in_what_is_replaced_have_files_of_their_own():
    names = ("a/b", "a?b", "a-b", "A-b", "a//b", "a", "A", "x" * 200, "x" * 201)
    traces = chrome_trace([traced(name, fingerprint=str(i)) for i, name in enumerate(names)])
    assert len({name.lower() for name in traces}) == len(names)


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_makes_a_safe_name(text):
    name = safe_name(text)
    assert SAFE_NAME.fullmatch(name) and len(name) <= MAX_SAFE_NAME + 9
    assert safe_name(name) == name or len(name) > MAX_SAFE_NAME


def test_a_safe_name_stays():
    assert safe_name("offload-sweep.b4_x") == "offload-sweep.b4_x"


@pytest.mark.parametrize("name", ["report.html", "traces"])
def test_a_report_is_not_written_through_a_link_out_of_its_folder(name, tmp_path):
    """Of a run directory of somebody else; a file that the user names may be a link."""
    run = write(tmp_path / "run", [traced("a")])
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("old")
    (run / name).symlink_to(outside if name == "traces" else outside / "kept")
    with pytest.raises(HarnessError, match="leads out of"):
        build([run])
    assert [path.name for path in outside.iterdir()] == ["kept"] and (outside / "kept").read_text() == "old"
    (tmp_path / "mine.md").symlink_to(outside / "kept")
    build([run], tmp_path / "mine.md")
    assert "##" in (outside / "kept").read_text()


@pytest.mark.parametrize("name", ["logs", "records.jsonl", "suite.yaml"])
def test_a_run_does_not_write_through_a_link_out_of_its_folder(name, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(outside if name == "logs" else outside / "file")
    store = Store(tmp_path / "run")
    with pytest.raises(HarnessError, match="leads out of"):
        store.open()
    store.close()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a\0b", "link/x"])
def test_paths_that_lead_out(name, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(HarnessError, match="leads out of"):
        inside(folder, name)
    assert is_below(name) == (name == "link/x")
    assert inside(folder, "a/b") == folder / "a" / "b" and is_below("a/b")


ATTACKS = (
    "</script><script>alert(1)</script><!-- \u2028 x",
    "<img src=//e onerror=alert(1)>",
    "[x](javascript:alert(1)) ![x](https://e/pixel.png)",
    "| a | b |\n| --- | --- |",
    "@team @org/team <!-- --> <details>",
    "]]><x/> &amp; \x00\x1b[31m \ufffe \uffff \ud800",
    "`a` ``b`` $x$ ~~y~~ \\",
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_format_takes_markup(attack, tmp_path):
    spec = cell(attack, suite=attack)
    records = [*repeats(spec, (1.0, 2.0, 3.0), trace=TRACE), failed(cell("b", seed=1), "error", attack)]
    run = write(tmp_path, records)
    html, md, xml = (
        {p.suffix: p.read_text("utf-8") for p in build([run])}[suffix] for suffix in (".html", ".md", ".xml")
    )
    html = html.replace(str(library()), "")
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", html, re.S)
    data = re.findall(r'<script type="application/json">(.*?)</script>', html, re.S)
    assert len(scripts) - len(data) <= 2  # the library and ours
    assert all(json.loads(text) and not re.search(r"[<>&\u2028]", text) for text in data)
    assert "<img" not in html and "<!--" not in html
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', html))
    assert not re.search(r"(?<!\\)[`\[]|@(?!\u200b)", md) and "<img" not in md
    assert_tables_are_whole(md)
    assert {case.tag for suite in ET.fromstring(xml.encode()) for case in suite} == {"testcase"}


def test_data_of_charts_are_clean(tmp_path):
    panel = Panel("t", "", {"height": 1, "data": [{"a\u202e": "x\x1b[31m\u202e", "n": 1.5}]}, None)
    content = page(read_runs([write(tmp_path, [record(cell())])]), [panel])
    document = html_of("report.html", page=content, library=None)
    (data,) = (text for text in re.findall(r'json">(.*?)</script>', document, re.S) if '"height": 1}' in text)
    assert json.loads(data) == {"height": 1, "data": [{"a\ufffd": "x\ufffd[31m\ufffd", "n": 1.5}]}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("\t=1+1", "'=1+1"),
        ("\r@SUM(1)", "'@SUM(1)"),
        ("\uff1d1+1", "'\uff1d1+1"),
        ("a;=1+1", "a;'=1+1"),
        ("a; -1", "a; -1"),
        ("-1.5", "'-1.5"),
        ("offload-sweep", "offload-sweep"),
    ],
)
def test_no_field_is_a_formula(given, shown, tmp_path):
    (line,) = csv.DictReader(io.StringIO(report(tmp_path, [record(cell(), reason=given)], "csv")))
    assert line["reason"] == shown


def test_numbers_stay_numbers(tmp_path):
    metrics = {"total_s": -1.5, "prefill_s": 2e-9}
    (line,) = csv.DictReader(io.StringIO(report(tmp_path, [replace(record(cell()), metrics=metrics)], "csv")))
    assert (line["total_s"], line["prefill_s"]) == ("-1.5", "2e-09")


def test_data_for_github_action_benchmark_have_no_markup():
    """Its comment puts a name into a code span of a table, unescaped."""
    name = "a` | ![x](//e) @team <img src=//e> |\n|"
    base, head = (repeats(cell(name), speeds) for speeds in ((1.0,) * 7, (1.1,) * 7))
    found = compare_records(Runs(tuple(base)), Runs(tuple(head)))
    (entry,) = json.loads(FORMATS["gab"]([found]))
    for text in (entry["name"], entry["extra"]):
        assert not re.search(r"[`|<>\[\]\n]|@(?!\u200b)", text)


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        ("harness run suites/x.yaml --set repeats=7 --cell a", "harness run suites/x.yaml --set repeats=7 --cell a"),
        ("harness run $OUT/x.yaml --cell a", "harness run $OUT/x.yaml --cell a"),
        ("harness run '$HOME/my suites/x.yaml'", "harness run '$HOME/my suites/x.yaml'"),
        ("harness run x; rm -rf /", "harness run 'x;' rm -rf /"),
        ("harness run x\nrm -rf /", "harness run x rm -rf /"),
        (
            "harness run $(id) `id` | sh && sh > x < y & #",
            "harness run '$(id)' '`id`' '|' sh '&&' sh '>' x '<' y '&' '#'",
        ),
        ("harness run ${IFS} *", "harness run '${IFS}' '*'"),
        ("harness run \x1b]0;x\x07", "harness run '\ufffd]0;x\ufffd'"),
        ("harness run 'open", ""),
        ("rm -rf /", ""),
        ("harness generate --output x", ""),
        ("", ""),
    ],
)
def test_a_command_to_repeat_runs_the_harness_and_nothing_else(recorded, shown, tmp_path):
    assert command_of(record(cell(), command=recorded)) == shown
    document = report(tmp_path, [record(cell(), command=recorded)])
    assert ('<h2 id="commands-title">' in document) == bool(shown)
