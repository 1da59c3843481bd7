"""Two runs beside each other: both answers, the verdict of each cell, and what differs between the runs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.api import HarnessError, WorkloadSpec
from reports.build import build_side_by_side
from reports.side_by_side import side_by_side
from reports.text import MISSING
from tests.records import HOSTILE, PROVENANCE, beside, cell, demo, failed, hostile_records, record, repeats, write

SPEEDS = (10.1, 9.8, 10.4, 9.9, 10.0, 10.2, 9.7)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    slow = [record(cell(), i, 0.7 * v, started_at=f"2026-11-21T05:{i:02}:30+00:00") for i, v in enumerate(SPEEDS)]
    return [write(tmp_path / "main", [*repeats(cell(), SPEEDS), *repeats(cell("b", "offload", seed=1), SPEEDS)]),
            write(tmp_path / "branch", [*slow, failed(cell("new", seed=2), "error", "x")])]  # fmt: skip


def texts(table) -> list[list[str]]:
    return [[c.text for c in row] for body in table.bodies for row in body.rows]


def test_both_answers_and_the_verdict_of_each_cell(runs):
    page = side_by_side(runs)
    ((_, first, second),) = texts(page["answers"])
    assert first == "accelerate-float32 is 1\u00d7 as fast as b, the fastest of another engine."
    assert second == "accelerate-float32."
    assert page["lead"].startswith("branch against main, throughput in tok/s: ")
    verdicts = {row[0]: row[1:5] for row in texts(page["cells"])}
    assert verdicts["accelerate-float32"] == ["regression", "10", "7", "0.700"]
    assert verdicts["b"][0] == "not comparable" and verdicts["new"][0] == "new"
    assert [c.title for c in page["cells"].columns][2:4] == ["main", "branch"]


def test_a_workload_that_one_side_did_not_run_is_said_to_be_missing_there(tmp_path, runs):
    longer = replace(cell(), workload=WorkloadSpec(prompt_len=512))
    both = write(tmp_path / "both", [*repeats(cell(), SPEEDS), *repeats(longer, SPEEDS)])
    (body,) = side_by_side([runs[0], both])["answers"].bodies
    common, one_sided = ([(c.text != MISSING, c.why) for c in row[1:]] for row in body.rows)
    assert common == [(True, ""), (True, "")]
    assert one_sided == [(False, "not run"), (True, "")]


def test_the_chart_joins_medians_of_a_cell_and_counts_launches(runs):
    (panel,) = side_by_side(runs)["panels"]
    data = panel.spec["data"]["values"]
    medians = {(d["cell"], d["side"]): d["value"] for d in data if d["kind"] == "median"}
    assert medians == pytest.approx({("1. accelerate-float32", "main"): 10.0, ("1. accelerate-float32", "branch"): 7.0,
                                     ("2. b", "main"): 10.0})  # fmt: skip
    assert sum(d["kind"] == "launch" for d in data) == 21


def test_what_differs_is_marked(tmp_path, runs):
    elsewhere = {**PROVENANCE, "machine": {**PROVENANCE["machine"], "cpu": "another"}}
    moved = write(tmp_path / "moved", repeats(cell(), SPEEDS, provenance=elsewhere))
    page = side_by_side([runs[0], moved])
    marked = {row[0].text: row[0].badges for row in page["sides"].bodies[0].rows}
    assert marked["Machine"] == ("differs",) and marked["Commit"] == ()
    assert any(item.startswith("machine.cpu was ") for item in page["differences"])
    assert side_by_side([runs[0], runs[0]])["title"] == "main (first) and main (second)"


def test_a_page_is_written_and_hostile_words_are_inert(tmp_path, runs):
    hostile = write(tmp_path / "hostile", [*hostile_records(), *demo(), beside(9.0, record(cell("d", seed=9)))])
    path = build_side_by_side([runs[0], hostile])
    assert path == hostile / "side_by_side.html"
    page = path.read_text()
    assert "<script>alert" not in page and HOSTILE.split(" |")[0] not in page
    data = re.findall(r'<script type="application/json">(.*?)</script>', page, re.S)
    assert data and all(map(json.loads, data))
    assert build_side_by_side(runs, tmp_path / "both.html") == tmp_path / "both.html"


def test_what_cannot_be_shown_is_one_line(tmp_path, runs):
    with pytest.raises(HarnessError, match=r"^--side-by-side takes two run directories, not 1$"):
        build_side_by_side(runs[:1])
    with pytest.raises(HarnessError, match=r"writes a page: name an \.html file"):
        build_side_by_side(runs, tmp_path / "both.md")
