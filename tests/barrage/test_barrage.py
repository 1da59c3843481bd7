"""Bad inputs by the hundred: every one is refused as it should be; and what would be a fault is seen."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from tests.barrage.__main__ import in_part
from tests.barrage.case import Case
from tests.barrage.checks import Outcome, faults
from tests.barrage.good import ROOT
from tests.barrage.inputs import every_case
from tests.barrage.inputs_options import commands, options
from tests.barrage.leftovers import leftovers, snapshot

MIB = 1 << 20
#: A case of each sort that needs no second.
SAMPLES = (
    "files/suite-validate/fifo",
    "files/suite-validate/3-gb",
    "files/suite-run/nested-lists",
    "files/suite-key/repeats/minus-one",
    "files/records-report/folder",
    "files/profile/loop",
    "options/report/--out/missing",
    "options/set/policy.schedule/text",
    "options/exclusive/json-without-dry-run",
    "prompts/line/list",
    "prompts/plain/max_tokens/minus-one",
    "records/version/99/report",
    "records/hostile/spec.name/html",
)


def barrage(*arguments):
    command = [sys.executable, "-m", "tests.barrage", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)


def test_samples_end_as_they_should():
    done = barrage(*(word for name in SAMPLES for word in ("--only", name)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].split()[:2] == ["all", str(len(SAMPLES))]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_ninth_ends_as_it_should():
    done = barrage("--part", "1/9", "--jobs", str(os.cpu_count() or 1))
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr


@pytest.fixture(scope="module")
def cases():
    return list(every_case())


def test_there_are_hundreds_of_every_kind_and_no_name_stands_for_two(cases):
    assert len({case.id for case in cases}) == len(cases) > 900
    assert min(Counter(case.kind for case in cases).values()) > 100
    assert {sum(in_part(case.id, f"{i}/3") for i in (1, 2, 3)) for case in cases} == {1}


def test_every_option_of_every_command_meets_values(cases):
    tried = {case.id.rpartition("/")[0] for case in cases}
    named = {f"options/{path}/{max(o.opts, key=len)}" for path, command in commands() for o in options(command)}
    assert named and named <= tried


REFUSED = Case("kind", "name", ("report", "x"))


@pytest.mark.parametrize(
    ("changes", "columns"),
    [
        ({}, set()),
        ({"err": "memory limit: 1MiB (set it by --memory)\nharness: x\n"}, set()),
        ({"err": "Usage: harness report [OPTIONS] DIRS...\nTry 'harness report -h' for help.\n\nError: no x\n"}, set()),
        ({"err": ""}, {"several lines"}),
        ({"err": "harness: x\nmore of it\n"}, {"several lines"}),
        ({"err": "harness: x\nharness: y\n"}, {"several lines"}),
        ({"err": "harness: \x1b[31mx\n"}, {"several lines"}),
        ({"case": replace(REFUSED, says="nearest")}, {"several lines"}),
        ({"code": 1}, {"wrong codes"}),
        ({"code": 1, "err": "Traceback (most recent call last):\n  x\nKeyError: 1\n"}, {"wrong codes", "tracebacks"}),
        ({"out": "Traceback (most recent call last):\n"}, {"tracebacks"}),
        ({"hung": True, "code": -9, "err": ""}, {"hangs"}),
        ({"peak_bytes": 101 * MIB}, {"memory"}),
        ({"left": ("tmp/x",)}, {"leftovers"}),
        ({"err": "", "case": replace(REFUSED, shell='exec "$@" 2>&-')}, set()),
        ({"err": "x.yaml:1:1: no\n", "case": replace(REFUSED, arguments=("validate", "x.yaml"))}, set()),
        ({"err": "x.yaml:1:1: no\nx.yaml:1:1: nor this\n", "case": replace(REFUSED, arguments=("validate",))}, set()),
        ({"err": "x.yaml:1:1: no\ny\n", "case": replace(REFUSED, arguments=("validate", "x.yaml"))}, {"several lines"}),
    ],
)
def test_faults_are_seen(changes, columns):
    good = Outcome(REFUSED, 2, 1.0, 100 * MIB, "", "harness: x; do y\n")
    assert set(faults(replace(good, **changes), 100 * MIB)) == columns


@pytest.fixture
def folder(tmp_path):
    """The folder of a case that has left nothing, and what a process id cannot be."""
    for name in ("work/cache", "tmp", "home"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "content", "code"),
    [
        ("tmp/x", "", 0),
        ("beside", "", 0),
        ("work/.out.jsonl.new-12", "", 0),
        ("work/.report.html.12", "", 0),
        ("work/.report.html.0a1b2c3d.12.tmp", "", 0),
        ("work/out/logs/a.log", "calls with xyzzy-hunter2", 1),
        ("work/cache/models/x.tmp-12/config.json", "{}", 0),
        ("work/cache/harness-job-x/y", "", 0),
        ("work/cache/work/1234/a-0/request.json", "{}", 0),
        ("work/out.jsonl", '{"line": 1}\n{"li', 1),
        ("work/r.html", "<html>", 0),
        ("work/r.md", "# a report of an input that was refused", 2),
        ("work/cache/contents.json", '{"a": ', 0),
    ],
)
def test_what_is_left_behind_is_seen(folder, file, content, code):
    before = snapshot(folder / "work")
    assert not leftovers(folder, 1 << 30, code, before)
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(content)
    assert leftovers(folder, 1 << 30, code, before)
    assert not file.startswith("work/r") or not leftovers(folder, 1 << 30, code, snapshot(folder / "work"))


def test_a_process_that_outlives_its_case_is_seen_and_ended(folder):
    marked = os.environ | {"BARRAGE_CASE": folder.name}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(["cat"], env=marked, start_new_session=True, **pipes)
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()  # it answers: the kernel shows a process without its environment while it is loaded
    (found,) = leftovers(folder, 1 << 30, 0, {})
    assert found == f"process {process.pid} (cat)"
    process.communicate()
    assert process.returncode == -9


def test_a_name_that_nobody_has_is_refused():
    done = barrage("--only", "nothing")
    assert done.returncode == 2 and "no such case" in done.stderr
