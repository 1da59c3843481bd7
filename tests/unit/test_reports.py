"""Reports: every figure by hand, hostile text inert in every format, damaged and newer records refused."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from harness.api import (
    Bound,
    HardwareLimits,
    HarnessError,
    LoadReport,
    MachineRates,
    Measurement,
    MemoryLimit,
    ModelSpec,
    OffloadPolicy,
    RequestTrace,
    RunRecord,
    RunSpec,
    Status,
    TraceEvent,
    Trial,
    WorkloadSpec,
    to_json,
)
from reports import text
from reports.build import build, load_records, summary_rows
from reports.charts import Linear, Log
from reports.records import read_runs
from reports.summary import CellSummary, headline, ranked
from reports.tables import allowed
from reports.terminal import summary_text
from reports.timeline import timelines

GOLDEN = Path(__file__).parent.parent / "golden" / "report.csv"
GIB = 2**30
MODEL = ModelSpec("facebook/opt-1.3b", "dummy", "bfloat16")
PROVENANCE = {
    "machine": {"cpu": "Intel(R) Xeon(R) Platinum 8481C", "cores_usable": 8, "ram_bytes": 67_416_000_000, "gpus": []},
    "python": "3.11.2",
    "git": {"commit": "c8102f3d0c6f4c7f9b0d1e2f3a4b5c6d7e8f9a0b", "dirty": False},
    "packages": {"torch": "2.8.0"},
}


def cell(name: str = "accelerate-float32", engine: str = "accelerate", **changes: Any) -> RunSpec:
    """A cell of the suite `demo`."""
    base = RunSpec(engine, MODEL, WorkloadSpec(), limits=HardwareLimits(host_memory=GIB), suite="demo", name=name)
    return replace(base, **changes)


def record(
    spec: RunSpec,
    repeat: int = 0,
    speed: float = 2.0,
    digests: Sequence[str] = ("a", "b", "c", "d"),
    dtype: str = "float32",
    batch: int = 4,
    **changes: Any,
) -> RunRecord:
    """A repeat that ended ok at `speed` tokens/s, on a machine whose disk allows 4 and whose compute 10."""
    tokens = 16 * len(digests)
    prefill = 0.25 * tokens / speed
    base = RunRecord(
        spec=spec,
        fingerprint=spec.fingerprint(),
        repeat=repeat,
        status="ok",
        started_at=f"2026-11-21T05:{repeat:02}:00+00:00",
        wall_s=60.0,
        load=LoadReport(50272, 2048, batch, OffloadPolicy(gpu_batch_size=batch), dtype, (0, GIB, GIB)),
        requests=tuple(
            RequestTrace(str(i), 128, 16, 0, 0.0, (prefill, tokens / speed), "length", d) for i, d in enumerate(digests)
        ),
        metrics={
            "generation_throughput_tok_s": speed,
            "decode_throughput_tok_s": speed * 1.25,
            "total_throughput_tok_s": speed * 9,
            "padded_throughput_tok_s": speed * 9,
            "total_s": tokens / speed,
            "prefill_s": prefill,
            "decode_s": 3 * prefill,
            "generated_tokens": float(tokens),
            "prompt_tokens": 8.0 * tokens,
            "padding_tokens": 0.0,
            "num_requests": float(len(digests)),
            "ttft_p50_s": prefill,
            "ttft_p99_s": prefill * 1.5,
            "tpot_p50_s": batch / speed,
            "tpot_p99_s": batch / speed * 1.1,
            "launch_s": 0.5,
            "import_s": 4.0,
        },
        measurements=(
            Measurement("wall_s", "s", (5.0,), "load"),
            Measurement("read_bytes", "bytes", (2.6e9,), "load"),
            Measurement("read_bytes", "bytes", (1e9 * tokens / 16,), "generate"),
            Measurement("write_bytes", "bytes", (0.0,), "generate"),
            Measurement("rss_anon_bytes", "bytes", (0.5 * GIB, 0.75 * GIB), "generate"),
            Measurement("rss_file_bytes", "bytes", (0.25 * GIB,), "generate"),
            Measurement("energy_j", "J", (), "generate", "no RAPL"),
        ),
        memory=MemoryLimit("cgroup-v2", GIB // 2, GIB, 3 * GIB // 2, 5 * GIB // 4, True),
        bound=Bound(4.0, 6.4, 16.0, "disk"),
        machine=MachineRates(
            (2.0e9, 2.1e9 + repeat * 1e8),
            (2048, 8192),
            {"float32": {"1": (8e9,), "64": (210e9,), "256": (400e9,)}, "bfloat16": {"64": (510e9,)}},
            f"2026-11-21T05:{repeat:02}:00+00:00",
        ),
        provenance=PROVENANCE,
        command=f"harness run demo --cell {spec.name}",
        log=f"logs/{spec.name}.log",
    )
    return replace(base, **changes)


def failed(spec: RunSpec, status: Status, reason: str, repeat: int = 0, **changes: Any) -> RunRecord:
    """A repeat that gave nothing."""
    plain = RunRecord(spec, spec.fingerprint(), repeat, status, reason, log=f"logs/{spec.name}.log")
    return replace(plain, **({"provenance": PROVENANCE, "started_at": "2026-11-21T05:00:00+00:00"} | changes))


def repeats(spec: RunSpec, speeds: Iterable[float], **changes: Any) -> list[RunRecord]:
    """One record a speed."""
    return [record(spec, i, speed, **changes) for i, speed in enumerate(speeds)]


def write(folder: Path, records: Iterable[RunRecord], tail: str = "") -> Path:
    """A run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(to_json(r)) + "\n" for r in records]
    (folder / "records.jsonl").write_text("".join(lines) + tail)
    return folder


def demo() -> list[RunRecord]:
    """A suite as it may come out: our engine, baselines, references, failures of both kinds."""
    unlimited: dict[str, Any] = {"limits": HardwareLimits(), "reference": True, "engine": "transformers"}
    resident = {"bound": None, "memory": MemoryLimit("none", GIB // 2, None, None, 4 * GIB)}
    oom = cell("transformers-within-limit", "transformers", expect="oom_host")
    broken = cell("flexgen-percent-50", "flexgen_ref")
    trials = (Trial(4, "ok", 1.1), Trial(8, "ok", 2.0), Trial(16, "oom_host", None, "cgroup OOM event at 1.5 GiB"))
    reason = "killed by the host limit (cgroup OOM event)"
    return [
        *repeats(cell(policy=OffloadPolicy(gpu_batch_size=8)), (2.0, 2.2, 1.9), batch=8, tuning=trials),
        *repeats(cell("accelerate-bfloat16"), (1.0, 1.1, 1.05), dtype="bfloat16", digests=("a", "b", "x", "d")),
        *repeats(cell("offload-zigzag", "offload"), (3.0, 3.2, 3.1)),
        *[failed(oom, "oom_host", reason, i) for i in range(3)],
        *[failed(broken, "error", "RuntimeError: expected scalar type Half but found Float", i) for i in range(3)],
        *repeats(cell("resident-float32", **unlimited), (11.0, 12.0, 11.5), **resident),
        *repeats(
            cell("resident-bfloat16", **unlimited, seed=0, warmup=2), (8.0, 8.2, 8.1), dtype="bfloat16", **resident
        ),
    ]


def by_name(records: Iterable[RunRecord]) -> dict[str, CellSummary]:
    """Summary rows by cell name."""
    return {row.name: row for row in summary_rows(records)}


# ------------------------------------------------------------------------------------------------ figures


def test_figures_of_a_cell() -> None:
    row = by_name(demo())["accelerate-float32"]
    assert (row.throughput, row.median, row.minimum, row.maximum) == ((2.0, 2.2, 1.9), 2.0, 1.9, 2.2)
    assert row.statuses == ("ok", "ok", "ok")
    assert (row.batch, row.compute_dtype, row.num_requests) == (8, "float32", 4)
    assert row.bound_fraction == pytest.approx(0.5)
    assert row.limited_by == "disk"
    assert row.decode_tok_s == pytest.approx(2.5)
    assert (row.ttft_p50_s, row.ttft_p99_s) == (8.0, 12.0)
    assert row.tpot_p50_s == 4.0
    assert row.tpot_p99_s == pytest.approx(4.4)
    assert (row.peak_bytes, row.limit_bytes) == (5 * GIB // 4, 3 * GIB // 2)
    assert row.read_bytes_per_token == pytest.approx(1e9 / 16)
    assert row.energy_j_per_token is None


def test_ratio_is_to_the_best_ranked_cell_of_another_engine() -> None:
    rows = by_name(demo())
    assert {r.engine: r.rival for r in rows.values() if r.ratio} == {
        "accelerate": "offload-zigzag",
        "offload": "accelerate-float32",
    }
    assert rows["accelerate-float32"].ratio == pytest.approx(2 / 3.1)
    assert rows["accelerate-bfloat16"].ratio == pytest.approx(1.05 / 3.1)
    assert rows["offload-zigzag"].ratio == pytest.approx(3.1 / 2)
    assert rows["resident-float32"].ratio is None
    assert rows["transformers-within-limit"].ratio is None


def test_an_engine_alone_is_compared_with_itself() -> None:
    rows = by_name([r for r in demo() if r.spec.engine == "accelerate"])
    assert rows["accelerate-float32"].ratio == pytest.approx(2 / 1.05)
    assert rows["accelerate-bfloat16"].ratio == pytest.approx(1.05 / 2)


def test_order_ranked_then_failed_then_references() -> None:
    names = [r.name for r in summary_rows(demo())]
    assert names[:3] == ["offload-zigzag", "accelerate-float32", "accelerate-bfloat16"]
    assert set(names[3:5]) == {"transformers-within-limit", "flexgen-percent-50"}
    assert set(names[5:]) == {"resident-float32", "resident-bfloat16"}


def test_agreement_is_with_the_reference_of_the_same_dtype() -> None:
    rows = by_name(demo())
    assert rows["accelerate-float32"].agreement == 1
    assert rows["accelerate-float32"].compared_with == "resident-float32"
    bfloat16 = rows["accelerate-bfloat16"]
    assert (bfloat16.equal_outputs, bfloat16.compared_outputs) == (9, 12)
    assert bfloat16.compared_with == "resident-bfloat16"
    assert rows["resident-float32"].agreement is None


def test_agreement_needs_the_same_seed() -> None:
    reference = cell("resident", "transformers", reference=True, seed=1)
    assert by_name([record(cell()), record(reference)])["accelerate-float32"].agreement is None


def test_cells_of_other_models_and_workloads_are_not_compared() -> None:
    other = cell("accelerate-long", workload=WorkloadSpec(prompt_len=512))
    rows = by_name([record(cell(), speed=1), record(other, speed=2)])
    assert {r.ratio for r in rows.values()} == {None}
    assert len({r.workload for r in rows.values()}) == 2


def test_a_repeat_that_failed_takes_a_cell_out_of_the_ranking() -> None:
    rows = summary_rows([record(cell("a"), 0, 9.0), failed(cell("a"), "timeout", "", 1), record(cell("b", seed=1))])
    assert [r.name for r in ranked(rows)] == ["b"]
    assert rows[1].median == 9.0 and rows[1].ratio is None and rows[1].status == "timeout"


def test_an_interrupted_repeat_says_nothing_about_the_engine() -> None:
    (row,) = summary_rows([record(cell()), failed(cell(), "interrupted", "interrupted", 1)])
    assert row.ok and row.status == "ok"


def test_expected_failures() -> None:
    rows = by_name(demo())
    assert rows["transformers-within-limit"].expected_failure
    assert not rows["flexgen-percent-50"].expected_failure
    assert not rows["flexgen-percent-50"].as_expected
    (surprise,) = summary_rows([record(cell(expect="oom_host"))])
    assert not surprise.expected_failure and not surprise.as_expected


def test_simulated_cells_are_never_ranked_above_measured_ones() -> None:
    records = [record(cell("a"), speed=1), record(cell("b", seed=1), speed=9, simulated=True)]
    assert [r.name for r in ranked(summary_rows(records))] == ["a"]
    assert [r.name for r in ranked(summary_rows(records[1:]))] == ["b"]
    assert "(simulated)" in headline(summary_rows(records[1:]))


def test_fewer_requests_are_marked() -> None:
    rows = by_name([record(cell("a")), record(cell("b", seed=1), digests=("a", "b"))])
    assert rows["b"].fewer_requests and not rows["a"].fewer_requests


def test_missing_and_impossible_figures_are_none() -> None:
    metrics = {"generation_throughput_tok_s": float("nan"), "ttft_p50_s": float("inf"), "decode_s": None}
    (row,) = summary_rows([record(cell(), metrics=metrics, bound=Bound(0.0, 0.0, 0.0, "disk"))])
    assert row.median is None and row.ttft_p50_s is None and row.bound_fraction is None and not row.ok


def test_what_each_resource_allows_is_the_median_over_repeats() -> None:
    bounds = (Bound(4.0, 4.0, 8.0, "disk"), Bound(2.0, 4.0, 8.0, "disk"), Bound(3.0, 4.0, 0.0, "compute"))
    (row,) = summary_rows([record(cell(), i, bound=b) for i, b in enumerate(bounds)])
    assert row.bound_tok_s == 3.0
    assert (allowed(row, "compute_s"), allowed(row, "disk_s")) == (4.0, 3.0)


def test_headline() -> None:
    assert headline(summary_rows(demo())) == (
        "Fastest within the limit: offload-zigzag, 3.10 tok/s, 1.55\u00d7 accelerate-float32, the best of another "
        "engine, at 77.5 % of the bound (disk)."
    )
    close = [*repeats(cell("a"), (2.0, 2.1)), *repeats(cell("b", seed=1), (1.9, 2.05))]
    assert "b, the next (their ranges overlap)" in headline(summary_rows(close))
    assert headline(summary_rows([failed(cell(), "error", "x")])) == "The cell gave no result."


def test_a_trace_is_drawn_and_written_for_perfetto(tmp_path: Path) -> None:
    events = (
        TraceEvent("w0", "load", 0.0, 4e5),
        TraceEvent("w1", "load", 2e5, 4e5),
        TraceEvent("w0", "compute", 5e5, 5e5, tid=2),
    )
    path = write(tmp_path, [record(cell("../traced"), trace=events), record(cell("plain", seed=1))])
    build([path])
    kept = json.loads((tmp_path / "traces" / "..-traced.json").read_text())
    assert kept["traceEvents"][1] == {"name": "w1", "cat": "load", "ts": 2e5, "dur": 4e5, "tid": 0, "pid": 0, "ph": "X"}
    assert [p.name for p in (tmp_path / "traces").iterdir()] == ["..-traced.json"]
    (drawn,) = timelines(summary_rows(load_records([tmp_path])))
    assert [(lane.name, lane.value) for lane in drawn.lanes] == [("load", "60 %"), ("compute", "50 %")]
    assert drawn.lanes[0].spans[1][:2] == (20.0, 40.0)
    assert "One pass of" in (tmp_path / "report.html").read_text()


# ------------------------------------------------------------------------------------------------ reading


def test_a_truncated_last_line_is_left_out_with_a_note(tmp_path: Path) -> None:
    line = json.dumps(to_json(record(cell(), 1)))
    runs = read_runs([write(tmp_path, [record(cell())], tail=line[: len(line) // 2])])
    assert len(runs.records) == 1
    assert "incomplete" in runs.notes[0]


def test_damage_elsewhere_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, [record(cell())], tail="{broken\n") / "records.jsonl"
    with pytest.raises(HarnessError, match=f"^{re.escape(str(path))}:2: not JSON"):
        load_records([tmp_path])


def test_the_last_of_duplicates_wins(tmp_path: Path) -> None:
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
    ],
)
def test_unreadable_records_are_one_clear_line(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "records.jsonl").write_text(content)
    with pytest.raises(HarnessError, match=message) as caught:
        load_records([tmp_path])
    assert "\n" not in str(caught.value)


def test_no_directory() -> None:
    with pytest.raises(HarnessError, match="no run directory"):
        load_records([])


def test_a_damaged_suite_file_is_only_noted(tmp_path: Path) -> None:
    write(tmp_path, [record(cell())])
    (tmp_path / "suite.yaml").write_text("description: [unclosed\n")
    assert "cannot be read" in read_runs([tmp_path]).notes[0]


# ------------------------------------------------------------------------------------------------ writing

HOSTILE = "<script>alert(1)</script> | `code` \n# *x* [l](javascript:1) ![i](//e) @all \x1b[31m \u202e \ud800 {{7*7}}"


class _Page(HTMLParser):
    """Collects what a browser would make of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def hostile_records() -> list[RunRecord]:
    """Every string a record carries is an attack."""
    spec = cell(HOSTILE, suite=HOSTILE, model=ModelSpec(HOSTILE, revision=HOSTILE))
    changes: dict[str, Any] = {
        "provenance": {HOSTILE: HOSTILE, "list": [HOSTILE, {HOSTILE: HOSTILE}]},
        "command": HOSTILE,
        "tuning": (Trial(1, "error", None, HOSTILE),),
    }
    machine = MachineRates((1.0,), (1, 1), {HOSTILE: {HOSTILE: (1.0,)}}, HOSTILE)
    load = LoadReport(1, 1, 1, OffloadPolicy(), HOSTILE, (0, 0, 0))
    memory = MemoryLimit(HOSTILE, 1, 1, 1, 1)
    reference = cell(HOSTILE, reference=True, seed=2, model=spec.model)
    return [
        record(spec, started_at=HOSTILE, machine=machine, load=load, memory=memory, **changes),
        failed(spec, "error", HOSTILE, 1, log=HOSTILE, **changes),
        record(reference, simulated=True),
    ]


@pytest.fixture
def hostile(tmp_path: Path) -> dict[str, str]:
    write(tmp_path, hostile_records())
    (tmp_path / "suite.yaml").write_text(json.dumps({"description": HOSTILE.replace("\ud800", "")}))
    return {p.suffix: p.read_text(encoding="utf-8") for p in build([tmp_path])}


def test_hostile_text_is_inert_in_html(hostile: dict[str, str]) -> None:
    page = _Page()
    page.feed(hostile[".html"])
    assert page.tags.count("script") == 1
    assert not {"img", "iframe", "link", "object"} & set(page.tags)
    assert not [a for a in page.attributes if a[0].startswith("on") or a[0] == "src"]
    assert all(v and v.startswith("#") for k, v in page.attributes if k == "href")
    assert "&lt;script&gt;alert(1)" in hostile[".html"]
    assert "{{7*7}}" in hostile[".html"]
    assert not set("\x1b\u202e") & set(hostile[".html"])


def test_html_needs_no_network(hostile: dict[str, str]) -> None:
    assert "default-src 'none'" in hostile[".html"]
    assert not re.search(r"""(src=|@import|url\(|href="?http)""", hostile[".html"])


def test_hostile_text_is_inert_in_markdown(hostile: dict[str, str]) -> None:
    document = hostile[".md"]
    assert set(re.findall(r"<[^>]*>", document)) == {"<details>", "</details>", "<summary>", "</summary>"}
    assert not re.search(r"(?<!\\)`", document)
    assert not re.search(r"(?<!\\)\[", document)
    assert "@all" not in document
    for block in re.findall(r"(?:^\|.*\n)+", document, re.M):
        pipes = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(pipes) == 1, block


def test_formulas_are_neutralised_in_csv(tmp_path: Path) -> None:
    spec = cell("=cmd|' /C calc'!A0", suite="+1", model=ModelSpec("@SUM(1)"))
    build([write(tmp_path, [record(spec, 0, reason="-2+3\n=1", command="\t=1")])])
    (line,) = csv.DictReader(io.StringIO((tmp_path / "report.csv").read_text()))
    assert all(not (v or "").startswith(("=", "+", "-", "@", "\t", "\r")) for v in line.values())
    assert line["name"] == "'=cmd|' /C calc'!A0"
    assert line["reason"] == "'-2+3 =1"


def test_csv_is_one_line_a_record(hostile: dict[str, str]) -> None:
    assert len(hostile[".csv"].splitlines()) == 1 + 3


def test_csv_golden(tmp_path: Path) -> None:
    shuffled = sorted(demo(), key=lambda r: r.repeat)
    build([write(tmp_path, shuffled)])
    assert (tmp_path / "report.csv").read_text() == GOLDEN.read_text(), "rewrite tests/golden/report.csv if intended"


def test_build_picks_places(tmp_path: Path) -> None:
    run = write(tmp_path / "run", demo())
    assert [p.name for p in build([run])] == ["report.html", "report.md", "report.csv"]
    assert build([run], tmp_path / "deep" / "folder")[0] == tmp_path / "deep" / "folder" / "report.html"
    assert build([run], tmp_path / "only.md") == [tmp_path / "only.md"]
    assert not list(tmp_path.rglob("*.part"))


def test_a_target_that_cannot_be_written(tmp_path: Path) -> None:
    run = write(tmp_path / "run", demo())
    (tmp_path / "file").write_text("")
    with pytest.raises(HarnessError, match=r"cannot write .*--out"):
        build([run], tmp_path / "file" / "out")


def test_html_is_complete_and_accessible(tmp_path: Path) -> None:
    build([write(tmp_path, demo())])
    document = (tmp_path / "report.html").read_text()
    page = _Page()
    page.feed(document)
    assert page.tags.count("caption") == page.tags.count("table")
    ids = [v for k, v in page.attributes if k == "id"]
    assert len(ids) == len(set(ids))
    assert {(v or "")[1:] for k, v in page.attributes if k == "href"} <= set(ids)
    assert page.tags.count("circle") >= 15  # every ok repeat is a dot
    for expected in ("oom_host (expected)", "never ranked", "harness run demo --cell offload-zigzag", "Batch search"):
        assert expected in document
    assert "77.5 % of the bound (disk)" in document


def test_markdown_holds_the_results(tmp_path: Path) -> None:
    build([write(tmp_path, demo())])
    document = (tmp_path / "report.md").read_text()
    assert "| offload-zigzag | ok | 4 | 3.10 | 1.55 | 77.5 | disk |" in document
    assert "5 cells" not in document and "7 cells, 21 repeats: 5 ok, 1 failed as expected" in document
    assert len(document) < 60_000


def test_terminal_summary() -> None:
    shown = summary_text([*demo(), *hostile_records()], width=100)
    assert "offload-zigzag" in shown and "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 100


# ------------------------------------------------------------------------------------------------ small parts


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1.416, "1.42"), (0.0542, "0.0542"), (12.34, "12.3"), (15432.1, "15,432"), (3, "3"), (1e-7, "1e-07")],
)
def test_numbers_have_three_digits(value: float, shown: str) -> None:
    assert text.number(value) == shown


def test_a_column_has_one_number_of_decimals() -> None:
    assert text.decimals([1.42, 0.754]) == 2
    assert text.decimals([120.0, 0.054]) == 3
    assert text.decimals([8, 16]) == 0
    assert text.decimals([]) == 0


@pytest.mark.parametrize("largest", [0.0, 1e-9, 0.7, 1.0, 3.2, 99.0, 1e12])
def test_linear_axes_hold_their_values(largest: float) -> None:
    axis = Linear(largest)
    assert 0 <= axis.at(largest) <= 100.0001
    assert 3 <= len(axis.ticks) <= 7
    assert len({label for _, label in axis.ticks}) == len(axis.ticks)


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (0.003, 900.0), (1e-9, 1e12), (10.0, 10.0)])
def test_log_axes_hold_their_values(low: float, high: float) -> None:
    axis = Log(low, high)
    assert -0.001 <= axis.at(low) <= axis.at(high) <= 100.001
    assert 2 <= len(axis.ticks) <= 8
