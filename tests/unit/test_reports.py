"""Reports: every figure by hand, hostile text inert in every format, damaged, odd and newer records refused."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.api import (
    Bound,
    HarnessError,
    Measurement,
    ModelSpec,
    OffloadPolicy,
    RunRecord,
    TraceEvent,
    Trial,
    WorkloadSpec,
    to_json,
)
from reports import text
from reports.answer import headline
from reports.build import build
from reports.figures import SUMMARY, allowed
from reports.records import load_records, read_runs
from reports.render import write as write_file
from reports.samples import Sample
from reports.sections import trials as trials_table
from reports.speed import DEFAULT, by_speed
from reports.summary import CellSummary, metric, per_token, ranked, summary_rows
from reports.terminal import summary_text
from reports.timeline import busy, utilisation_panel
from reports.vega import library
from tests.records import (
    GIB,
    HOSTILE,
    PROVENANCE,
    assert_tables_are_whole,
    beside,
    cell,
    demo,
    failed,
    hostile_records,
    record,
    repeats,
    report,
    write,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "report.csv"
#: The data of charts in a page.
DATA = re.compile(r'<script type="application/json">(.*?)</script>', re.S)


def by_name(records: Iterable[RunRecord]) -> dict[str, CellSummary]:
    """Summary rows by cell name."""
    return {row.name: row for row in summary_rows(records)}


def test_figures_of_a_cell():
    row = by_name(demo())["accelerate-float32"]
    assert (row.throughput, row.median) == ((2.0, 2.2, 1.9), 2.0)
    assert next(f for f in SUMMARY if f.title == "Range").get(row) == "1.90 to 2.20"
    assert row.statuses == ("ok", "ok", "ok")
    assert (row.batch, row.compute_dtype, row.num_requests) == (8, "float32", 4)
    assert (row.bound_fraction, row.job_fraction, row.limited_by) == (pytest.approx(0.5), pytest.approx(0.4), "disk")
    figures = {"decode_throughput_tok_s": 2.5, "ttft_p50_s": 8, "ttft_p99_s": 12, "tpot_p50_s": 4, "tpot_p99_s": 4.4}
    assert {name: metric(row.ok_records, name) for name in figures} == pytest.approx(figures)
    assert (row.peak_bytes, row.limit_bytes) == (5 * GIB // 4, 3 * GIB // 2)
    assert per_token(row.ok_records, "read_bytes") == pytest.approx(1e9 / 16)
    assert per_token(row.ok_records, "energy_j") is None


def test_what_was_tried_shows_how_often_each_survived_and_how_fast():
    faster, killed = {"options.ubatch": 2048}, ("oom_host", None, "killed")
    trials = (
        *(Trial(8, "ok", 2.0), Trial(16, "ok", 3.0), Trial(16, "ok", 3.4, "a repeat"), Trial(16, *killed)),
        *(Trial(8, "ok", 2.1, "", faster), Trial(4, *killed, {"options.buffers": 5})),
    )
    spec = cell(policy=OffloadPolicy(gpu_batch_size=8), tune="max_batch")
    rows = summary_rows(repeats(spec, (2.2, 2.4), batch=8, tuning=trials, settings=faster))
    table = trials_table(rows)
    found = {(line[0].text, line[1].text): [c.text for c in line[2:]] for line in table.bodies[0].rows}
    assert found == {
        ("8", "its own"): ["1 of 1", "2.00", ""],
        ("16", "its own"): ["2 of 3", "3.20", "oom_host: killed"],
        ("8", "ubatch 2048"): ["3 of 3", "2.20", ""],
        ("4", "buffers 5"): ["0 of 1", text.MISSING, "oom_host: killed"],
    }
    assert [line[0].badges for line in table.bodies[0].rows] == [(), (), ("chosen",), ()]


def ratios(records: Iterable[RunRecord]) -> dict[str, float]:
    """By the names of cells that have one."""
    return {row.name: row.ratio.ratio for row in summary_rows(records) if row.ratio}


def test_ratio_is_to_the_best_ranked_cell_of_another_engine_or_else_of_the_same():
    ours = {"accelerate-float32": 2 / 3.1, "accelerate-bfloat16": 1.05 / 3.1, "offload-zigzag": 3.1 / 2}
    assert ratios(demo()) == pytest.approx(ours)
    alone = {"accelerate-float32": 2 / 1.05, "accelerate-bfloat16": 1.05 / 2}
    assert ratios(r for r in demo() if r.spec.engine == "accelerate") == pytest.approx(alone)


SPEEDS = st.lists(st.floats(0.5, 500.0), min_size=1, max_size=7)


@given(SPEEDS, SPEEDS)
def test_a_headline_says_what_its_table_and_compare_say(ours, theirs):
    """Also of launches in two modes, whose median quotient was 4.47 beside medians that differ 2.5-fold."""
    records = [*repeats(cell("a", "offload"), ours), *repeats(cell("b", seed=1), theirs)]
    rows = summary_rows(records)
    first, second = rows[0].median, rows[1].median
    assert [r.ratio.ratio for r in rows] == [first / second, second / first]
    assert f"{text.number(first / second)}{text.TIMES_SIGN}" in headline(rows)
    a, b = (Sample(row.records) for row in rows)
    assert [v.ratio for v in by_speed([(b, a)], DEFAULT)] == [a.level / b.level] == [first / second]


def test_order_ranked_then_failed_then_references():
    names = [r.name for r in summary_rows(demo())]
    assert names[:3] == ["offload-zigzag", "accelerate-float32", "accelerate-bfloat16"]
    assert set(names[3:5]) == {"transformers-within-limit", "flexgen-percent-50"}
    assert set(names[5:]) == {"resident-float32", "resident-bfloat16"}


def test_agreement_is_with_the_reference_of_the_same_dtype_and_seed():
    rows = by_name(demo())
    assert (rows["accelerate-float32"].equal_outputs, rows["accelerate-float32"].compared_outputs) == (12, 12)
    assert (rows["accelerate-bfloat16"].equal_outputs, rows["accelerate-bfloat16"].compared_outputs) == (9, 12)
    assert rows["resident-float32"].compared_outputs is None
    exact = record(cell("exact", "transformers", reference=True))
    rounded = record(cell("rounded", "transformers", reference=True, warmup=2), dtype="bfloat16", digests="abxd")
    ours = record(cell("ours"), dtype="bfloat16", digests="abxd")
    assert by_name([exact, rounded, ours])["ours"].equal_outputs == 4
    assert by_name([exact, ours])["ours"].equal_outputs == 3
    other_seed = record(cell("exact", "transformers", reference=True, seed=1))
    assert by_name([other_seed, ours])["ours"].compared_outputs is None


def test_cells_of_other_models_and_workloads_are_not_compared():
    other = cell("accelerate-long", workload=WorkloadSpec(prompt_len=512))
    rows = by_name([record(cell(), speed=1), record(other, speed=2)])
    assert {r.ratio for r in rows.values()} == {None}
    assert len({r.workload for r in rows.values()}) == 2


def test_a_repeat_that_failed_takes_a_cell_out_of_the_ranking():
    rows = summary_rows([record(cell("a"), 0, 9.0), failed(cell("a"), "timeout", "", 1), record(cell("b", seed=1))])
    assert [r.name for r in ranked(rows)] == ["b"]
    assert rows[1].median == 9.0 and rows[1].ratio is None and rows[1].status == "timeout"


def test_an_interrupted_repeat_says_nothing_about_the_engine():
    (row,) = summary_rows([record(cell()), failed(cell(), "interrupted", "interrupted", 1)])
    assert row.ok and row.status == "ok"


def test_expected_failures():
    rows = by_name(demo())
    assert rows["transformers-within-limit"].expected_failure
    (success,) = summary_rows([record(cell(expect="oom_host"))])
    for surprise in (rows["flexgen-percent-50"], success):
        assert not surprise.expected_failure and not surprise.as_expected
    stopped = [failed(cell(expect="oom_host"), status, "", i) for i, status in enumerate(("oom_host", "interrupted"))]
    (row,) = summary_rows(stopped)
    assert row.expected_failure and row.as_expected and Sample(tuple(stopped)).expected_failure
    assert not summary_rows(stopped[1:])[0].expected_failure and not Sample(tuple(stopped[1:])).expected_failure


def on_busy_machine(others: Sequence[float], speeds: Sequence[float] = (2.0, 2.1, 1.9, 1.0)) -> list[RunRecord]:
    """Launches of ten CPU seconds, of which the last two lost so many to others."""
    taken = (0.1,) * (len(speeds) - len(others)) + tuple(others)
    return [beside(other, r) for r, other in zip(repeats(cell(), speeds), taken, strict=True)]


def test_the_kernel_s_threads_are_used_time_and_nobody_else_s():
    launch = beside(1.0, record(cell(), 0, 10.0))
    assert launch.others_cpu == pytest.approx(1 / 11) and launch.disturbed
    by_kernel = Measurement("cpu_kernel_s", "s", (9.0,), "generate")
    assert replace(launch, measurements=(*launch.measurements, by_kernel)).others_cpu == pytest.approx(1 / 20)


def test_disturbed_launches_are_left_out_and_named(tmp_path):
    (row,) = summary_rows(on_busy_machine([0.7, 10.0]))
    assert row.throughput == (2.0, 2.1) and row.median == 2.05 and len(row.records) == 4
    told = "2 of 4 launches left out of its figures because others took 7% to 50% of the CPU: 1.90, 1.00 tok/s."
    document = report(tmp_path, on_busy_machine([0.7, 10.0]), "md")
    assert told in document and "differ by a factor" not in document
    assert "launches differ by a factor of 2.10 without a known cause" in report(tmp_path, on_busy_machine([0.1]), "md")


def test_a_cell_that_was_always_disturbed_keeps_its_figures_and_says_so(tmp_path):
    records = on_busy_machine([10.0] * 4)
    assert summary_rows(records)[0].median == 1.95
    told = "all launches were disturbed (others took 50% of the CPU): measure it again"
    assert told in report(tmp_path, records, "md")


def test_a_launch_that_ran_again_is_told(tmp_path):
    first, again = on_busy_machine([10.0], (2.0,)), on_busy_machine([0.1], (2.1,))
    runs = read_runs([write(tmp_path, [*first, *again])])
    assert [r.metrics["generation_throughput_tok_s"] for r in runs.records] == [2.1]
    words = (
        "Skipped 1 of 2 records: a later record of the same cell and repeat replaces them, 1 because others disturbed"
    )
    assert runs.notes[0].startswith(words)


def test_a_few_ticks_of_the_clock_disturb_nothing():
    """The clocks of a phase of a tenth of a second tick ten times on each core."""
    short = (Measurement("cpu_own_s", "s", (0.1,), "generate"), Measurement("cpu_other_s", "s", (0.05,), "generate"))
    assert not record(cell(), measurements=short).disturbed
    stolen = Measurement("cpu_steal_s", "s", (9.9,), "generate")
    quiet = on_busy_machine([0.0])[0]
    assert quiet.others_cpu == 0 and replace(quiet, measurements=(*quiet.measurements, stolen)).others_cpu == 0.5


def test_simulated_cells_are_never_ranked_above_measured_ones():
    records = [record(cell("a"), speed=1), record(cell("b", seed=1), speed=9, simulated=True)]
    assert [r.name for r in ranked(summary_rows(records))] == ["a"]
    assert [r.name for r in ranked(summary_rows(records[1:]))] == ["b"]
    assert "(simulated)" in headline(summary_rows(records[1:]))


def test_fewer_requests_are_marked():
    rows = by_name([record(cell("a")), record(cell("b", seed=1), digests=("a", "b"))])
    assert rows["b"].fewer_requests and not rows["a"].fewer_requests


def test_missing_and_impossible_figures_are_none():
    metrics = {"generation_throughput_tok_s": float("nan"), "ttft_p50_s": float("inf"), "decode_s": None}
    (row,) = summary_rows([record(cell(), metrics=metrics, bound=Bound(0.0, 0.0, 0.0, "disk"))])
    assert row.median is None and row.bound_fraction is None and not row.ok
    assert metric(row.ok_records, "ttft_p50_s") is None


def test_what_each_resource_allows_is_the_median_over_repeats():
    bounds = (Bound(4.0, 4.0, 8.0, "disk"), Bound(2.0, 4.0, 8.0, "disk"), Bound(3.0, 4.0, 0.0, "compute"))
    (row,) = summary_rows([record(cell(), i, bound=b) for i, b in enumerate(bounds)])
    assert (row.bound_tok_s, allowed(row, "compute_s"), allowed(row, "disk_s")) == (3.0, 4.0, 3.0)


def test_headline():
    assert headline(summary_rows(demo())) == (
        "offload-zigzag is 1.55\u00d7 [1.30, 1.79] accelerate-float32, the fastest of another engine, and at 62 % of "
        "what this machine allows for the job: 3.10 tok/s within the limit."
    )
    close = [*repeats(cell("a"), (2.0, 2.1, 2.05)), *repeats(cell("b", seed=1), (1.9, 2.05, 2.0))]
    assert "b, the next fastest cell" in headline(summary_rows(close))
    assert "(not significant: the interval includes 1)" in headline(summary_rows(close))
    assert "too few launches for an interval" in headline(summary_rows([record(cell("a")), record(cell("b", seed=1))]))
    assert headline(summary_rows([failed(cell(), "error", "x")])) == "The cell has no result."


def test_a_trace_is_drawn_and_written_for_perfetto(tmp_path):
    events = (
        TraceEvent("w0", "load", 0.0, 4e5),
        TraceEvent("w1", "load", 2e5, 4e5),
        TraceEvent("w0", "compute", 5e5, 5e5, tid=2),
    )
    path = write(tmp_path, [record(cell("../traced"), trace=events), record(cell("plain", seed=1))])
    build([path])
    (file,) = (tmp_path / "traces").iterdir()
    assert re.fullmatch(r"traced-[0-9a-f]{8}\.json", file.name)
    kept = json.loads(file.read_text())
    assert kept["traceEvents"][1] == {"name": "w1", "cat": "load", "ts": 2e5, "dur": 4e5, "tid": 0, "pid": 0, "ph": "X"}
    (row,) = summary_rows([record(cell("traced"), trace=events)])
    panel = utilisation_panel([row])
    assert [c.text for c in panel.table.bodies[0].rows[0][1:]] == ["1", "60", "50"]  # seconds, and percent of them
    lanes = {d["lane"]: d["shares"] for d in panel.spec["data"]["values"]}
    assert lanes["load"][0] == 1.0 and lanes["load"][-1] == 0.0 and lanes["compute"][-1] == 1.0


def test_each_rank_has_a_lane_in_which_waiting_is_not_busy():
    events = (
        TraceEvent("w0", "compute", 0.0, 1e6, tid=4),
        TraceEvent("compute", "rank 0", 5e5, 5e5, 0, 1),
        TraceEvent("wait", "rank 0", 0.0, 5e5, 0, 1),
        TraceEvent("compute", "rank 1", 0.0, 4e5, 1, 2),
        TraceEvent("send", "rank 1", 4e5, 1e5, 1, 2),
    )
    (row,) = summary_rows([record(cell("traced"), trace=events)])
    panel = utilisation_panel([row])
    assert [column.title for column in panel.table.columns][2:] == ["compute", "rank 0", "rank 1"]
    assert [c.text for c in panel.table.bodies[0].rows[0][1:]] == ["1", "100", "50", "50"]
    drawn = {(d["cell"].split(": ")[-1], d["lane"]): d["shares"] for d in panel.spec["data"]["values"]}
    assert drawn["rank 0", "wait"][0] == drawn["rank 0", "compute"][-1] == drawn["rank 1", "compute"][0] == 1.0
    assert drawn["rank 0", "compute"][0] == drawn["rank 1", "send"][0] == 0.0
    assert "Each rank has a lane" in panel.note


def test_busy_shares_are_of_each_part_and_count_overlaps_once():
    events = (TraceEvent("a", "x", 0.0, 15.0), TraceEvent("b", "x", 10.0, 10.0), TraceEvent("c", "x", 35.0, 1.0))
    assert busy(events, 40.0, 4) == [1.0, 1.0, 0.0, 0.1]


class _Page(HTMLParser):
    """Collects what a browser would make of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


@pytest.fixture
def hostile(tmp_path: Path) -> dict[str, str]:
    write(tmp_path, hostile_records())
    (tmp_path / "suite.yaml").write_text(json.dumps({"description": HOSTILE.replace("\ud800", "")}))
    return {p.suffix: p.read_text(encoding="utf-8") for p in build([tmp_path])}


def test_hostile_text_is_inert_in_html(hostile):
    page = _Page()
    page.feed(hostile[".html"])
    scripts = re.findall(r"<script([^>]*)>", hostile[".html"])
    assert sum("application/json" not in s for s in scripts) == 2  # the library and ours; what else there is is data
    assert not {"img", "iframe", "link", "object"} & set(page.tags)
    assert not [a for a in page.attributes if a[0].startswith("on") or a[0] == "src"]
    assert all(v and v.startswith("#") for k, v in page.attributes if k == "href")
    assert "&lt;script&gt;alert(1)" in hostile[".html"]
    assert "{{7*7}}" in hostile[".html"]
    data = DATA.findall(hostile[".html"])
    assert data and all(json.loads(text) for text in data)
    assert not set("\x1b\u202e") & set(hostile[".html"])
    assert "default-src 'none'" in hostile[".html"]  # it needs no network
    own = hostile[".html"].replace(str(library()), "")
    assert not re.search(r"""(src=|@import|url\(|href="?http)""", own)


def test_hostile_text_is_inert_in_markdown_and_one_line_a_record_in_csv(hostile):
    document = hostile[".md"]
    assert set(re.findall(r"<[^>]*>", document)) == {"<details>", "</details>", "<summary>", "</summary>"}
    assert not re.search(r"(?<!\\)`", document)
    assert not re.search(r"(?<!\\)\[", document)
    assert "@all" not in document
    assert_tables_are_whole(document)
    assert len(hostile[".csv"].splitlines()) == 1 + 3


def test_formulas_are_neutralised_in_csv(tmp_path):
    spec = cell("=cmd|' /C calc'!A0", suite="+1", model=ModelSpec("@SUM(1)"))
    table = report(tmp_path, [record(spec, 0, reason="-2+3\n=1", command="\t=1")], "csv")
    (line,) = csv.DictReader(io.StringIO(table))
    assert all(not (v or "").startswith(("=", "+", "-", "@", "\t", "\r")) for v in line.values())
    assert line["name"] == "'=cmd|' /C calc'!A0"
    assert line["reason"] == "'-2+3 =1"


def test_csv_golden(tmp_path):
    shuffled = sorted(demo(), key=lambda r: r.repeat)
    assert report(tmp_path, shuffled, "csv") == GOLDEN.read_text(), "rewrite tests/golden/report.csv if intended"


def test_build_picks_places(tmp_path):
    run = write(tmp_path / "run", demo())
    assert [p.name for p in build([run])] == ["report.html", "report.md", "report.csv", "report.xml"]
    assert build([run], tmp_path / "deep" / "folder")[0] == tmp_path / "deep" / "folder" / "report.html"
    assert build([run], tmp_path / "only.md") == [tmp_path / "only.md"]
    assert not list(tmp_path.rglob(".*")), "nothing half written is left"


@pytest.mark.parametrize("out", ["file/out", "a" * 300, "folder/" + "a" * 300 + ".html"])
def test_a_target_that_cannot_be_written(tmp_path, out):
    run = write(tmp_path / "run", [record(cell())])
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match=r"^cannot write .*choose another place with --out$"):
        build([run], tmp_path / out)


def test_a_target_that_is_a_folder(tmp_path):
    for folder in (tmp_path, Path()):
        with pytest.raises(HarnessError, match="it is a folder"):
            write_file(folder, "text")


def test_html_is_complete_and_accessible(tmp_path):
    document = report(tmp_path, demo())
    page = _Page()
    page.feed(document)
    assert page.tags.count("caption") == page.tags.count("table")
    ids = [v for k, v in page.attributes if k == "id"]
    assert len(ids) == len(set(ids))
    assert {(v or "")[1:] for k, v in page.attributes if k == "href"} <= set(ids)
    throughput = json.loads(DATA.findall(document)[0])
    dots = [d for d in throughput["data"]["values"] if d["kind"] in ("repeat", "beyond")]
    assert len(dots) >= 15  # every ok repeat is a dot
    for expected in ("never ranked", "harness run demo --cell offload-zigzag", "Batch search"):
        assert expected in document
    assert "62 % of what this machine allows for the job" in document


def test_markdown_holds_the_results(tmp_path):
    document = report(tmp_path, demo(), "md")
    assert "| offload-zigzag | 3.10 | 1.55 | 1.30 to 1.79 | ok | 62 | 77.5 | disk | 4 |" in document
    assert "5 cells" not in document and "7 cells, 21 repeats: 5 ok, 1 failed as expected" in document
    assert len(document) < 60_000


def test_terminal_summary():
    shown = summary_text([*demo(), *hostile_records()], width=100)
    assert "offload-zigzag" in shown and "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1.416, "1.42"), (0.0542, "0.0542"), (12.34, "12.3"), (15432.1, "15,432"), (3, "3"), (1e-7, "1e-07")],
)
def test_numbers_have_three_digits(value, shown):
    assert text.number(value) == shown


@pytest.mark.parametrize(("values", "decimals"), [([1.42, 0.754], 2), ([120.0, 0.054], 3), ([8, 16], 0), ([], 0)])
def test_a_column_has_one_number_of_decimals(values, decimals):
    assert text.decimals(values) == decimals


def test_junit_has_a_case_for_each_cell(tmp_path):
    odd = [failed(cell("odd", seed=9), "error", "boom <&> \x00\ufffe", repeat) for repeat in range(2)]
    awaited = failed(replace(cell("awaited", seed=8), expect="infeasible"), "infeasible", "too large")
    stopped = failed(cell("stopped", seed=7), "interrupted", "")
    document = report(tmp_path, [*repeats(cell("fine"), [1.0, 2.0, 3.0]), *odd, awaited, stopped], "xml")
    (suite,) = ET.fromstring(document.encode())
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "1", "1")
    cases = {case.get("name"): case for case in suite}
    failure = cases["odd"].find("failure")
    assert failure is not None and "2 of 2 launches: error: boom <&>" in failure.get("message", "")
    assert cases["stopped"].find("skipped") is not None
    assert "2 tok/s, 3 launches" in "".join(cases["fine"].itertext())
    assert cases["awaited"].find("failure") is None


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
        ('{"schema_version": 5, "new": 1}\n', "schema_version 5 is newer than 4"),
        ("[1]\n", "not a record"),
        ("{}\n", "not a record"),
        ('{"schema_version": 3}\n', "field 'spec' is missing"),
        ("[" * 100_000 + "\n1\n", "not JSON"),
        ('{"schema_version": 3, "wall_s": NaN}\n', "NaN is no number"),
    ],
)
def test_unreadable_records_are_one_clear_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "records.jsonl").write_text(content)
    with pytest.raises(HarnessError, match=message) as caught:
        load_records([tmp_path])
    assert "\n" not in str(caught.value)


def test_a_name_too_long_a_circular_link_and_no_folder_cannot_be_read(tmp_path):
    (tmp_path / "records.jsonl").symlink_to(tmp_path / "records.jsonl")
    for folder in (tmp_path, Path("a" * 300)):
        with pytest.raises(HarnessError, match="cannot read"):
            load_records([folder])
    with pytest.raises(HarnessError, match="no run directory"):
        load_records([])


@pytest.mark.parametrize("speed", [0.0, -1.0, 1e300])
def test_impossible_speeds_are_not_ranked(tmp_path, speed):
    odd = replace(record(cell("odd", seed=3)), metrics={"generation_throughput_tok_s": speed})
    other = {**PROVENANCE, "machine": {"ram_bytes": 10**400}, "git": "none"}
    assert "odd" in report(tmp_path, [odd, record(cell(), provenance=other), record(cell("b", "offload", seed=1))])


def test_a_damaged_suite_file_is_only_noted(tmp_path):
    write(tmp_path, [record(cell())])
    (tmp_path / "suite.yaml").write_text("description: [unclosed\n")
    assert "cannot be read" in read_runs([tmp_path]).notes[0]
