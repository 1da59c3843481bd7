"""What a report says around its figures: the machine's rates, what differs, remarks, what a technique is worth."""

from dataclasses import replace

import pytest

from harness.api import Forecast, HardwareLimits, MachineRates, OffloadPolicy, RequestTrace
from reports.ablation import ablation_panel, ablations
from reports.latency import request_latency, spread_panels
from reports.page import page
from reports.records import read_runs
from reports.sections import commit, failures, machine_rates, period, provenance, setup, spark_cell
from reports.summary import by_workload, summary_rows
from reports.tables import MOST_ROWS, Body, Cell, Column, Table, plain_table
from reports.text import MISSING
from reports.vega import COLOURS
from tests.records import GIB, PROVENANCE, cell, failed, record, repeats, write


def texts(table):
    """The lines of a table with one group of rows."""
    (body,) = table.bodies
    return [[c.text for c in line] for line in body.rows]


def probed(repeat, disk, gemm, **changes):
    machine = MachineRates(disk, (2048, 8192), {"float32": gemm}, f"2026-11-21T05:{repeat:02}", **changes)
    return record(cell(), repeat, machine=machine)


def test_rates_are_medians_of_probes_and_extremes_of_samples():
    """In GB/s and GFLOP/s, rows in the order of numbers; what is not a number does not count."""
    table = machine_rates([
        probed(2, (5e9,), {"8": (8e9,), "64": (30e9, 10e9)}),
        probed(0, (1e9, 3e9, float("nan")), {"8": (2e9,), "64": (50e9,)}),
        probed(1, (4e9,), {"1": (1e9,)}),
    ])  # fmt: skip
    assert texts(table) == [
        ["Disk read", "GB/s", "4", "1", "5", "3", ""],
        ["GEMM float32, 1 row", "GFLOP/s", "1", "1", "1", "1", ""],
        ["GEMM float32, 8 rows", "GFLOP/s", "5", "2", "8", "2", ""],
        ["GEMM float32, 64 rows", "GFLOP/s", "35", "10", "50", "2", ""],
    ]
    assert "k x n = 2048x8192" in table.caption
    assert machine_rates([record(cell(), machine=None)]) is None
    device = machine_rates([probed(0, (), {"8": (2e9,)}, h2d=(12e9,))])
    assert [line[0] for line in texts(device)] == ["Copies to the device", "GEMM on the device float32, 8 rows"]


def test_a_sparkline_has_zero_at_the_bottom_and_goes_from_edge_to_edge():
    ends = spark_cell([1.0, 4.0, 2.0]).spark
    assert [x for x, _ in ends] == [4, 50, 96]
    bottom = 90.0
    heights = [bottom - y for _, y in ends]
    assert heights == pytest.approx([h * heights[1] for h in (0.25, 1.0, 0.5)])
    assert 0 < bottom - heights[1] < 20, "the largest is near the top"
    assert spark_cell([3.0]).spark[0][0] == 4
    assert [y for _, y in spark_cell([0.0, 0.0]).spark] == [90, 90]


def test_what_differs_between_records_is_counted():
    other = PROVENANCE | {"python": "3.12.1", "empty": None, "list": [1, {"a": 2, "b": 3}]}
    rows = {line[0].text: line[1] for line in provenance(
        [record(cell(), i, provenance=known) for i, known in enumerate((PROVENANCE, other, PROVENANCE))]
    ).bodies[0].rows}  # fmt: skip
    assert rows["python"] == Cell("3.11.2 (2 records); 3.12.1 (1 record)", badges=("differs",))
    assert rows["packages.torch"] == Cell("2.8.0")
    assert rows["machine.ram"].text == f"{67_416_000_000 / GIB:.1f} GiB"
    assert rows["list"].text == "1, 2 3"
    assert "empty" not in rows
    many = [record(cell(), i, provenance={"python": str(i)}) for i in range(6)]
    (line,) = texts(provenance(many))
    assert line[1].endswith("3 (1 record); and 2 more")
    assert provenance([record(cell(), provenance={})]) is None


def test_the_commit_is_that_of_all_records():
    git = {"git": {"commit": "a" * 40, "dirty": True}}
    clean, changed = record(cell()), record(cell(), 1, provenance=git)
    assert commit([clean, clean]) == "c8102f3d0c6f"
    assert commit([changed]) == "a" * 12 + ", with local changes"
    assert commit([clean, changed]) == ""


def test_a_run_lasts_from_its_first_start_to_its_last():
    starts = [record(cell(), i) for i in (2, 0, 1)]
    assert period(starts) == "2026-11-21 05:00:00 UTC to 2026-11-21 05:02:00 UTC"
    assert period(starts[:1]) == "2026-11-21 05:02:00 UTC"
    assert period([replace(starts[0], started_at="")]) == ""


def test_each_cell_says_where_it_ran_and_how_it_was_loaded():
    image = PROVENANCE | {"image": "peer", "image_digest": "sha256:" + "0" * 64}
    load = replace(record(cell()).load, notes=("first", "second"))
    others = record(cell("c", seed=2), simulated=True), failed(cell("d", seed=3), "error", "")
    rows = summary_rows([record(cell("a"), load=load), record(cell("b", seed=1), provenance=image), *others])
    assert {line[0]: line[1:] for line in texts(setup(rows))} == {
        "a": ["process", "torch 2.8.0", "first; second"],
        "b": ["peer sha256:000000000000", "torch 2.8.0", MISSING],
    }
    assert setup(summary_rows([failed(cell(), "error", "")])) is None


def remarks(tmp_path, *records):
    (workload,) = page(read_runs([write(tmp_path, records)]))["workloads"]
    return "\n".join(workload["remarks"])


def test_remarks_are_made_where_they_hold_and_nowhere_else(tmp_path):
    plain = repeats(cell("a"), (2.0, 2.1, 2.2))
    assert remarks(tmp_path / "0", *plain) == ""
    limits = HardwareLimits(host_memory=2 * GIB)
    assert "The limits differ" in remarks(tmp_path / "1", *plain, *repeats(cell("b", limits=limits), (2.0, 2.1, 2.2)))
    assert "fewer than three" in remarks(tmp_path / "2", *plain[:2])
    assert "fewer than three" not in remarks(tmp_path / "3", *(replace(r, simulated=True) for r in plain[:1]))
    assert "Simulated cells are not measurements" in remarks(
        tmp_path / "4", *plain, record(cell("s", seed=1), simulated=True)
    )
    fewer = repeats(cell("b", seed=1), (2.0, 2.1, 2.2), digests=("a", "b"))
    assert "Not all cells completed the same number" in remarks(tmp_path / "5", *plain, *fewer)
    reference = cell("r", "transformers", reference=True, limits=HardwareLimits())
    told = remarks(tmp_path / "6", *plain, *repeats(reference, (11.0, 11.5, 12.0)))
    assert told == "References without the limit: r 11.5 tok/s."


def test_the_model_s_error_is_the_median_over_cells_and_its_largest(tmp_path):
    """Cells of 2 tokens a second, of which 1.5, 2.2 and 3 were predicted: 25 % too few, 10 % and 50 % too many."""
    told = remarks(tmp_path, *(
        record(cell(str(i), seed=i), predicted=Forecast("local", speed, {})) for i, speed in enumerate((1.5, 2.2, 3.0))
    ))  # fmt: skip
    assert "median error over 3 cells is 25 %, its largest 50 %" in told


@pytest.mark.parametrize(("factor", "told"), [(1.9, False), (2.0, True)])
def test_launches_that_differ_by_twice_are_told(tmp_path, factor, told):
    found = remarks(tmp_path, *repeats(cell("a"), (2.0, 2.0 * factor, 2.5)))
    assert ("a: launches differ by a factor of 2" in found) is told


def test_a_technique_is_worth_its_cell_s_speed_by_the_base_s():
    full = OffloadPolicy(schedule="sweep", weight_bits=4)
    rows = summary_rows([
        *repeats(cell("full", "offload", policy=full), (4.0, 4.1, 4.2)),
        *repeats(cell("fast", "offload", policy=replace(full, overlap=False)), (8.2, 8.1, 8.3)),
        *repeats(cell("slow", "offload", policy=replace(full, weight_bits=16)), (2.05, 2.0, 2.1)),
        *repeats(cell("few", "offload", policy=replace(full, kv_bits=8)), (4.1,)),
        *repeats(cell("elsewhere", "offload", policy=replace(full, schedule="row"),
                      limits=HardwareLimits(host_memory=9 * GIB)), (1.0, 1.1)),
    ])  # fmt: skip
    base, changes = ablations(rows)
    assert base.name == "full", "from which most others differ in one technique"
    assert [(c.row.name, c.ratio.ratio) for c in changes] == [
        ("fast", 8.2 / 4.1), ("few", 1.0), ("slow", 2.05 / 4.1)
    ]  # fmt: skip
    panel = ablation_panel(rows)
    bars = panel.spec["data"]["values"]
    assert [(d["kind"], d["from"], d["to"]) for d in bars] == [
        ("base cell", 0.0, 4.1), ("gains", 4.1, 8.2), ("gains", 4.1, 4.1), ("loses", 4.1, 2.05)
    ]  # fmt: skip
    lines = {line[0]: line[1:] for line in texts(panel.table)}
    assert lines["full"] == ["base cell", MISSING, "4.10", MISSING, MISSING]
    assert lines["fast"][:4] == ["overlap True to False", MISSING, "8.20", "2.00"]
    low, high = map(float, lines["slow"][4].split(" to "))
    assert low <= 0.5 <= high
    assert lines["few"][4] == MISSING
    assert "changed with it" not in panel.note


def traced(name, seed, *times):
    requests = tuple(RequestTrace(str(i), 8, len(each), 0, 1.0, each, "length", "d") for i, each in enumerate(times))
    return record(cell(name, seed=seed), requests=requests)


def test_a_distribution_needs_two_times_and_a_colour_of_its_own():
    """Times that are no times (before the start, not finite) are left out, and with them cells that have no others."""
    broken = traced("broken", 99, (float("nan"),), (1.0,), (0.5,), (3.0,))
    good = [traced(f"c{i}", i, (2.0, 3.0), (4.0, 5.5)) for i in range(len(COLOURS) + 2)]
    first, later = spread_panels(summary_rows([broken, *good]))
    for panel in (first, later):
        assert [d["cell"] for d in panel.spec["data"]["values"]] == [f"c{i}" for i in range(len(COLOURS))]
        assert f"first {len(COLOURS)} of {len(COLOURS) + 2} cells" in panel.note
        assert len(panel.table.bodies[0].rows) == len(COLOURS) + 2
    assert texts(first.table)[0] == ["c0", "2", "1", "3", "3", "3", "3"]
    assert texts(later.table)[0] == ["c0", "2", "1.00", "1.50", "1.50", "1.50", "1.50"]


def test_a_request_takes_until_its_last_token():
    (row,) = summary_rows([traced("a", 0, (2.0, 3.0), (4.0, 5.5), (1.5, 9.0))])
    assert request_latency(row) == 4.5
    (planned,) = summary_rows([record(cell(), requests=(), metrics={"block_latency_s": 7.0,
                                                                     "generation_throughput_tok_s": 1.0})])  # fmt: skip
    assert request_latency(planned) == 7.0


@pytest.mark.parametrize(("rows", "shown"), [(MOST_ROWS, MOST_ROWS), (MOST_ROWS + 1, MOST_ROWS)])
def test_a_long_table_says_how_much_of_it_is_shown(rows, shown):
    table = plain_table("All", [Column("A")], [[Cell(str(i))] for i in range(rows)]).first()
    assert [line[0] for line in texts(table)] == [str(i) for i in range(shown)]
    assert ("first" in table.caption) is (rows > shown)


def test_workloads_stay_apart():
    rows = summary_rows([record(cell("a")), record(cell("b", workload=replace(cell().workload, prompt_len=512)))])
    assert [len(group) for group in by_workload(rows).values()] == [1, 1]


def test_a_long_table_is_cut_across_its_groups():
    sizes = {"a": MOST_ROWS - 1, "b": 3, "c": 1}
    bodies = tuple(Body(tuple((Cell(str(i)),) for i in range(size)), name) for name, size in sizes.items())
    table = Table("All", (Column("A"),), bodies).first()
    assert [(body.heading, len(body.rows)) for body in table.bodies] == [("a", MOST_ROWS - 1), ("b", 1)]
    assert table.caption == f"All; the first {MOST_ROWS} of {MOST_ROWS + 3} rows, report.csv has all"


def test_failures_say_how_often_why_and_where_the_log_is():
    """A status that the suite expects is no fault; what is missing says that."""
    big = cell(name="big", expect="infeasible", limits=HardwareLimits(host_memory=GIB // 4))
    table = failures(summary_rows([
        record(cell(), 0), failed(cell(), "oom_host", "killed", 1, log="logs/one.log"),
        failed(cell(), "oom_host", "killed", 2, log="logs/two.log"), failed(cell(), "error", "", 3, log=""),
        failed(big, "infeasible", "too small", 0, log="logs/big.log"),
    ]))  # fmt: skip
    name = cell().name
    assert sorted(texts(table)) == sorted([
        [name, "oom_host", "2 of 4", "killed", "logs/two.log"],
        [name, "error", "1 of 4", MISSING, MISSING],
        ["big", "infeasible", "1 of 1", "too small", "logs/big.log"],
    ])  # fmt: skip
    (body,) = table.bodies
    by_status = {line[1].text: line for line in body.rows}
    assert by_status["infeasible"][1].badges == ("expected",) and by_status["infeasible"][1].tone == "muted"
    assert by_status["error"][1].badges == () and by_status["error"][1].tone == "bad"
    assert [c.why for c in by_status["error"]][3:] == ["no reason recorded", "no log kept"]
    assert [c.why for c in by_status["oom_host"]][3:] == ["", ""]
    assert failures(summary_rows([record(cell(), 0)])) is None
