"""What charts draw: the right points from records, and the cells they leave out."""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from unittest.mock import Mock

import pytest

from harness.api import Accuracy, Forecast, ModelSpec, OffloadPolicy, RequestTrace, WorkloadSpec
from reports.ablation import ablation_panel, ablations
from reports.accuracy import accuracy_panel
from reports.charts import bound_panel, memory_panel, predicted_panel, tasks_panel, throughput_panel, tiers_panel
from reports.latency import pareto_front, pareto_panel, spread_panels
from reports.published import published_table
from reports.records import read_runs
from reports.stats import interval_of
from reports.summary import summary_rows
from reports.vega import MOST_CELLS, library
from tests.records import cell, demo, failed, record, repeats, report

ROWS = summary_rows(demo())


def values(panel, kind=None):
    """The data of a chart, of one kind if asked."""
    data = panel.spec["data"]["values"]
    return [d for d in data if kind is None or d.get("kind") == kind]


def test_throughput_has_every_repeat_its_median_and_interval():
    panel = throughput_panel(ROWS)
    ours = [d for d in values(panel) if d["cell"] == "offload-zigzag"]
    assert sorted(d["value"] for d in ours if d["kind"] == "repeat") == [3.0, 3.1, 3.2]
    assert [d["value"] for d in ours if d["kind"] == "median"] == [3.1]
    assert [(d["low"], d["high"]) for d in ours if d["kind"] == "interval"] == [interval_of((3.0, 3.2, 3.1))]
    # references would squeeze what competes: they are arrows at the end of the axis
    references = {f"resident-{dtype} (reference)" for dtype in ("float32", "bfloat16")}
    assert {d["cell"] for d in values(panel, "beyond")} == references


def test_charts_hold_so_many_cells_and_say_so():
    many = [record(cell(f"c{i}", seed=i), speed=1 + i) for i in range(MOST_CELLS + 5)]
    panel = throughput_panel(summary_rows(many))
    assert len({d["cell"] for d in values(panel)}) == MOST_CELLS
    assert f"first {MOST_CELLS} of {MOST_CELLS + 5} cells" in panel.note
    assert len(panel.table.bodies[0].rows) == MOST_CELLS + 5


def test_cells_of_one_name_are_told_apart():
    rows = summary_rows([record(cell("a")), record(cell("a", seed=1))])
    assert {d["cell"] for d in values(throughput_panel(rows))} == {"a", "a (2)"}


def test_memory_and_bound_and_tiers():
    assert {d["kind"] for d in values(memory_panel(ROWS))} == {"peak", "limit"}
    allowed = {d["kind"]: d["value"] for d in values(bound_panel(ROWS)) if d["cell"] == "offload-zigzag"}
    assert allowed == pytest.approx({"compute allows": 10.0, "disk allows": 4.0, "measured": 3.1})
    tiers = [d for d in values(tiers_panel(ROWS)) if d["cell"] == "offload-zigzag"]
    assert {d["kind"]: d["value"] for d in tiers if "value" in d} == {"RAM": 1.0, "disk": 1.0}
    assert {d["kind"]: d["limit"] for d in tiers if "limit" in d} == {"RAM": 1.0}


def test_tasks_only_where_an_engine_tells_them():
    assert tasks_panel(ROWS) is None
    base = record(cell("a"))
    seconds = {"task_products_s": 3.0, "task_load_weights_s": 2.0, "task_other_s": 0.0}
    larger = {"task_products_s": 6.0, "task_load_weights_s": 4.0, "generated_tokens": 128.0}
    jobs = [replace(record(spec), metrics=base.metrics | metrics)
            for spec, metrics in ((cell("a"), seconds), (cell("b", seed=1), larger))]  # fmt: skip
    panel = tasks_panel(summary_rows(jobs))
    told = [d for d in values(panel) if "value" in d]
    expected = {"products": 1000 * 3 / 64, "load weights": 1000 * 2 / 64}  # of each of 64, and of 128 tokens
    for name in ("a", "b"):
        assert {d["kind"]: d["value"] for d in told if d["cell"] == name} == pytest.approx(expected)
    assert [d["whole"] for d in values(panel) if "whole" in d] == [500.0, 500.0]  # at two tokens a second


def test_predictions_beside_measurements():
    assert predicted_panel(ROWS) is None
    told = record(cell("a"), predicted=Forecast("local", 2.5, {}))
    panel = predicted_panel(summary_rows([told]))
    assert [(d["measured"], d["value"]) for d in panel.spec["layer"][1]["data"]["values"]] == [(2.0, 2.5)]


def test_the_front_is_what_nothing_beats_in_both():
    assert pareto_front([(1, 5), (2, 4), (2, 8), (3, 8), (4, 9), (0.5, 1)]) == [(0.5, 1), (1, 5), (2, 8), (4, 9)]
    assert pareto_front([]) == []


def test_pareto_leaves_references_off_the_line():
    panel = pareto_panel([r for r in ROWS if r.throughput])
    line = [d["value"] for d in panel.spec["layer"][0]["data"]["values"]]
    assert line == [3.1]  # the fastest is the quickest as well; the resident ones are no choice here
    assert pareto_panel([r for r in ROWS if r.throughput][:1]) is None


def test_times_are_spread_over_requests():
    requests = tuple(
        RequestTrace(str(i), 8, 3, 0, 1.0, (1.0 + i, 2.0 + i, 4.0 + i), "length", "d") for i in range(1, 101)
    )
    first, later = spread_panels(summary_rows([record(cell("a"), requests=requests)]))
    (curve,) = values(first)
    assert curve["at"][-1] == 100.0 and curve["share"][-1] == 1.0
    assert dict(zip(curve["at"], curve["share"], strict=True))[50.0] == 0.5
    assert [c.text for c in first.table.bodies[0].rows[0][1:]] == ["100", "50", "90", "95", "99", "100"]
    assert set(values(later)[0]["at"]) == {1.5}  # (4 - 1) / 2 intervals


def test_an_ablation_is_of_cells_that_differ_in_one_thing():
    full = OffloadPolicy(schedule="sweep", weight_bits=4, kv_bits=4)
    records = [
        *repeats(cell("full", "offload", policy=full), (3.0, 3.1)),
        *repeats(cell("no-overlap", "offload", policy=replace(full, overlap=False)), (2.0, 2.1)),
        *repeats(cell("exact", "offload", policy=replace(full, weight_bits=16, kv_bits=16)), (1.0, 1.1)),
        *repeats(cell("both", "offload", policy=replace(full, overlap=False, weight_bits=16)), (0.5, 0.6)),
        *repeats(cell("other", "accelerate"), (0.4, 0.5)),
    ]
    found = ablations(summary_rows(records))
    base, changes = found
    assert base.name == "full"
    assert [(s.row.name, s.change, s.sequences) for s in changes] == [
        ("no-overlap", "overlap True to False", ""),
        ("exact", "weight_bits 4 to 16, kv_bits 4 to 16", ""),
    ]
    panel = ablation_panel(summary_rows(records))
    assert [(d["from"], d["kind"]) for d in values(panel)] == [(0.0, "base cell"), (3.05, "loses"), (3.05, "loses")]
    assert ablation_panel(summary_rows(records[:4])) is None  # one change is no ablation


def test_an_ablation_tells_the_schedule_from_the_batch_that_changed_with_it():
    def tried(name: str, batch: int, batches: int = 1, schedule: str = "sweep", speed: float = 3.0):
        policy = OffloadPolicy(gpu_batch_size=batch, num_gpu_batches=batches, schedule=schedule)
        return repeats(cell(name, "offload", policy=policy), (speed, speed), batch=batch * batches)

    records = [*tried("full", 48), *tried("split", 12, 4, "zigzag", 2.0), *tried("row", 24, 1, "row", 1.5),
               *tried("half", 24, speed=1.0)]  # fmt: skip
    _, changes = ablations(summary_rows(records))
    assert [(c.row.name, c.change, c.sequences) for c in changes] == [
        ("split", "num_gpu_batches 1 to 4, schedule sweep to zigzag", ""),
        ("row", "schedule sweep to row", "48 to 24"),
        ("half", "", "48 to 24"),
    ]
    panel = ablation_panel(summary_rows(records))
    assert [d["pure"] for d in values(panel)] == [True, True, False, True]
    assert "the sequences at once changed with it" in panel.note


def test_accuracy_over_speed():
    def judged(name: str, value: float, seed: int):
        found = Accuracy("lambada", "", 500, {"acc": value, "acc_stderr": 0.02})
        return record(cell(name, seed=seed), accuracy=found)

    panel = accuracy_panel(summary_rows([judged("a", 0.3, 0), judged("b", 0.25, 1)]))
    points = panel.spec["layer"][0]["data"]["values"]
    assert sorted((d["value"], round(d["high"], 3)) for d in points) == [(0.25, 0.29), (0.3, 0.34)]
    assert accuracy_panel(ROWS) is None


def test_published_figures_stand_beside_ours(tmp_path):
    workload = WorkloadSpec(prompt_len=512, gen_len=32)
    spec = cell("ours", "offload", model=ModelSpec("facebook/opt-30b"), workload=workload)
    rows = summary_rows([record(spec, speed=14.64, simulated=True)])
    assert published_table(rows, ()) is None
    table = published_table(rows, {"flexgen_throughput_t4", "unknown"})
    assert table is not None and "FlexGen (Sheng et al. 2023)" in table.caption and "ours, simulated" in table.caption
    figures = {row[0].text: (row[2].text, row[3].text) for row in table.bodies[0].rows}
    assert figures["flexgen"] == ("7.32", "2")
    assert set(figures) == {"accelerate", "deepspeed", "flexgen", "flexgen_c"}
    (tmp_path / "suite.yaml").write_text("name: x\nreproduces: flexgen_throughput_t4\n")
    assert "Published results and ours" in report(tmp_path, [record(spec)])
    assert read_runs([tmp_path]).reproduces == {"flexgen_throughput_t4"}
    other = published_table(ROWS, {"flexgen_throughput_t4"})  # another model
    assert other is not None and "No published results for this model" in other.caption
    assert "No published results for this model" in report(tmp_path, [record(cell("ours", "offload"))])


def test_the_end_of_a_log_is_shown_of_what_should_not_have_failed(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "broken.log").write_text("".join(f"line {i}\n" for i in range(100)) + "<b>boom</b>\n")
    (logs / "meant.log").write_text("secret\n")
    meant = failed(cell("meant", expect="infeasible", seed=1), "infeasible", "")
    document = report(tmp_path, [failed(cell("broken"), "error", "boom"), meant])
    assert "&lt;b&gt;boom&lt;/b&gt;" in document and "line 99" in document and "line 10\n" not in document
    assert "secret" not in document


def test_a_log_outside_of_the_run_is_not_read(tmp_path):
    (tmp_path / "outside.log").write_text("secret\n")
    records = [failed(cell("broken"), "error", "boom", log="../outside.log")]
    assert "secret" not in report(tmp_path / "run", records)


def test_mixed_machines_are_told(tmp_path):
    first = record(cell())
    other = {**first.provenance, "machine": {**first.provenance["machine"], "cpu": "another"}}
    document = report(tmp_path, [first, record(cell("b", seed=1), provenance=other)], "md")
    assert "These records come from 2 machines" in document


def test_without_the_charts_package_the_page_is_complete(tmp_path, monkeypatch):
    monkeypatch.setattr("reports.vega.version", Mock(side_effect=PackageNotFoundError("vl-convert-python")))
    document = report(tmp_path, demo())
    assert len(document.encode()) < 300_000
    assert "Figures of this chart" in document


def test_the_charts_code_is_made_once_and_kept(tmp_path):
    first = library(tmp_path)
    (kept,) = tmp_path.iterdir()
    assert str(first) == kept.read_text() and "</script" not in str(first).lower()
    kept.write_text(f"{kept.read_text()}// kept")
    assert str(library(tmp_path)) == kept.read_text()
    for other in ("evil()", f"{first}</script><script>evil()"):
        kept.write_text(other)
        assert str(library(tmp_path)) == str(first), "somebody else's script goes into no report"
    (tmp_path / "file").write_text("")
    assert library(tmp_path / "file") == first  # a cache that cannot be written
