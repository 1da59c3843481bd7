"""What a report answers at its top: who is fastest or how accurate, how sure, what limits it, and on which machine."""

import json
import re
from typing import Any

import pytest

from harness.api import Accuracy, OffloadPolicy, RunRecord, WorkloadSpec
from reports.answer import answer_of
from reports.build import build
from reports.machine import machine_words
from reports.records import load_records, read_runs
from reports.summary import summary_rows
from tests.records import PROVENANCE, cell, demo, failed, record, repeats, report, write

ELSEWHERE = {**PROVENANCE, "machine": {**PROVENANCE["machine"], "cpu": "another"}}


def test_the_answer_says_who_how_much_how_sure_and_what_limits():
    answer = answer_of(summary_rows(demo()))
    assert answer.claim == "offload-zigzag is 1.55\u00d7 as fast as accelerate-float32, the fastest of another engine."
    assert answer.facts == {
        "Throughput": "3.10 tok/s within the limit",
        "How sure": "1.30 to 1.79 \u00d7 (95 %), 3 and 3 launches",
        "Limited by": "disk, at 62 % of what this machine allows for the job",
    }


def test_what_is_not_sure_is_not_said_to_be():
    close = [*repeats(cell("a"), (2.0, 2.1, 2.05)), *repeats(cell("b", seed=1), (1.9, 2.05, 2.0))]
    assert answer_of(summary_rows(close)).facts["How sure"].startswith("not settled: ")
    single = [record(cell("a")), record(cell("b", seed=1))]
    assert "not known: 1 and 1 launch, an interval" in answer_of(summary_rows(single)).facts["How sure"]
    nothing = answer_of(summary_rows([failed(cell(), "error", "x")]))
    assert (nothing.claim, nothing.facts) == ("The cell has no result.", {})


def answered(name: str, wrong: int, seed: int, **changes: Any) -> RunRecord:
    """A cell that answers so many of 100 examples wrongly."""
    right = [0.0] * wrong + [1.0] * (100 - wrong)
    figures = {"acc": 1 - wrong / 100, "acc_stderr": 0.04}
    accuracy = Accuracy("lambada", "", 100, figures, outcomes={"acc": right})
    return record(cell(name, "offload", seed=seed, **changes), accuracy=accuracy)


def bits(weight_bits: int) -> dict[str, Any]:
    return {"policy": OffloadPolicy(weight_bits=weight_bits)}


def test_a_report_on_a_task_leads_with_its_accuracy(tmp_path):
    records = [answered("exact", 10, 0), answered("eight", 11, 1, **bits(8)), answered("four", 60, 2, **bits(4))]
    answer = answer_of(summary_rows(records))
    assert answer.claim == "No significant difference in acc from exact arithmetic: eight; 1 of 2 are worse."
    assert answer.facts["Exact answers"] == "acc 0.90 (standard error 0.0400), 100 examples".replace("0.90", "0.900")
    assert answer.facts["Closest to them"].startswith("eight: -0.01 [")
    assert list(answer.facts)[-1] == "Fastest"
    document = report(tmp_path, records)
    assert document.index("Accuracy of the answers") < document.index("Summary, fastest first")


def test_all_worse_and_none_compared():
    worse = answer_of(summary_rows([answered("exact", 10, 0), answered("four", 60, 2, **bits(4))]))
    assert worse.claim == "1 cell of 1 significantly worse in acc than exact arithmetic."
    assert worse.facts["How sure"] == "significant at 5%, 100 pairs of answers"
    assert worse.facts["Closest to them"].startswith("four: -0.5 [")
    apart = [
        answered("exact", 10, 0),
        record(cell("b", "other", seed=1), accuracy=Accuracy("x", "", 100, {"acc": 0.8})),
    ]
    assert answer_of(summary_rows(apart)).claim == "acc 0.800 to 0.900 in 2 cells."
    alone = answer_of(summary_rows([answered("exact", 10, 0)]))
    assert alone.claim == "exact: acc 0.900."


def test_the_machine_in_a_line():
    assert machine_words(demo()) == "Intel(R) Xeon(R) Platinum 8481C, 8 cores, 62.8 GiB of RAM, disk 2.10 GB/s, no GPU"
    assert machine_words([record(cell(), provenance={}, machine=None)]) == ""
    assert machine_words([record(cell(), simulated=True)]) == ""


def test_descriptions_are_folded_and_a_report_on_many_runs_opens_with_their_answers(tmp_path):
    runs = [
        write(tmp_path / str(i), [record(cell(f"c{i}", workload=WorkloadSpec(prompt_len=100 + i)))]) for i in (1, 2)
    ]
    for run in runs:
        (run / "suite.yaml").write_text(json.dumps({"description": f"Why {run.name}"}))
    build([*runs], tmp_path / "all.html")
    page = (tmp_path / "all.html").read_text()
    assert re.search(
        r"<details class=\"about\"><summary>What was measured</summary>\s*<p>Why 1</p>\s*<p>Why 2</p>", page
    )
    assert page.index("<span>Answers</span>") < page.index("What was measured")
    assert page.count('<a href="#workload-') == 2


def test_what_a_star_names_besides_run_directories_is_skipped(tmp_path):
    run = write(tmp_path / "run", [record(cell())])
    (tmp_path / "index.md").write_text("")
    (tmp_path / "empty").mkdir()
    runs = read_runs([tmp_path / "empty", tmp_path / "index.md", run])
    assert len(runs.records) == 1
    assert [n for n in runs.notes if "it has no records.jsonl" in n] == [
        f"Skipped {tmp_path / name}: it has no records.jsonl." for name in ("empty", "index.md")
    ]


def test_runs_of_two_machines_are_not_compared(tmp_path):
    one = write(tmp_path / "1", [record(cell(), 0, 1.0), record(cell("b", "offload", seed=1), 0, 2.0)])
    later = record(cell(), 0, 9.0, provenance=ELSEWHERE, started_at="2026-11-22T05:00:00+00:00")
    two = write(tmp_path / "2", [failed(cell("x", seed=9), "error", "x", provenance={}), later])
    assert len(load_records([one, two])) == 4, "none replaces that of another machine"
    build([one, two], tmp_path / "all.md")
    document = (tmp_path / "all.md").read_text()
    assert "- Machine 1: Intel" in document and "- Machine 2: another, 8 cores" in document
    assert "**b is 2\u00d7 as fast as accelerate-float32" in document.replace("2.00", "2")
    assert "9\u00d7" not in document and "not comparable" not in document


@pytest.mark.parametrize("suffix", ["html", "md"])
def test_cells_have_permalinks(tmp_path, suffix):
    document = report(tmp_path, demo(), suffix)
    fingerprint = cell("offload-zigzag", "offload").fingerprint()
    assert (f'<tr id="cell-1-{fingerprint[:12]}">' in document) == (suffix == "html")
