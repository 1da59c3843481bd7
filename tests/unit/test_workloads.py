"""Requests by the lengths of a trace: as in the file, cut to the limits, and what is told where it cannot be read."""

from pathlib import Path

import pytest

from engines.models.shapes import shape
from engines.planning.host_planner import HostPlanner
from engines.planning.planned_job import PlannedJob
from engines.planning.workload import Lengths
from harness import hardware, registry
from harness.api import HarnessError, OffloadPolicy, WorkloadSpec
from reports.records import load_records
from suites.workloads import Traced

DATA = Path(__file__).parents[3] / "shared" / "data"
AZURE = DATA / "trace_azure_llm_2023" / "AzureLLMInferenceTrace_conv.csv"
RESULTS = Path(__file__).parents[2] / "docs" / "results"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def trace(tmp_path: Path, lines: str, header: str = HEADER) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(header + lines, encoding="utf-8")
    return path


def test_requests_have_the_lengths_of_the_lines_within_the_limits(tmp_path: Path) -> None:
    path = trace(tmp_path, "a,5,3\nb,4000,2\nc,0,900\n")
    job = WorkloadSpec("trace", 100, 50, 4, str(path))
    assert registry.lengths(job) == [(5, 3), (100, 2), (1, 50), (5, 3)]
    requests = registry.workload(job).requests(1000, 4, seed=0)
    assert [(len(r.prompt), r.sampling.max_tokens) for r in requests] == registry.lengths(job)
    assert requests[0].prompt != requests[3].prompt
    assert registry.lengths(WorkloadSpec()) == []


@pytest.mark.parametrize(
    ("header", "lines", "words"),
    [
        (HEADER, "", "has no lines below its header"),
        (HEADER, "a,5,3\nb,five,3\n", "trace.csv:3: expected integers"),
        (HEADER, "a,5\n", "trace.csv:2: expected integers"),
        (HEADER, "a,-5,3\n", "trace.csv:2: a number of tokens is negative"),
        ("when,prompt\n", "1,2\n", "trace.csv:2: expected integers in ContextTokens and GeneratedTokens"),
    ],
)
def test_what_is_no_trace_is_told_with_its_line(tmp_path: Path, header: str, lines: str, words: str) -> None:
    with pytest.raises(HarnessError, match=words):
        Traced(str(trace(tmp_path, lines, header)), 10, 10).lengths(3)


def test_a_mark_of_the_byte_order_is_no_part_of_the_header(tmp_path: Path) -> None:
    path = trace(tmp_path, "7,3\n", "\ufeffContextTokens,GeneratedTokens\n")
    assert Traced(str(path), 10, 10).lengths(1) == [(7, 3)]


def test_a_trace_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="cannot be read: No such file"):
        Traced(str(tmp_path / "none.csv"), 10, 10).lengths(3)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HarnessError, match="it is not text"):
        Traced(str(tmp_path / "binary.csv"), 10, 10).lengths(3)


@pytest.mark.parametrize("run", sorted(path.parent.name for path in RESULTS.glob("*/records.jsonl")))
def test_records_of_other_days_are_still_of_the_same_cells(run: str) -> None:
    for record in load_records([RESULTS / run]):
        assert record.spec.fingerprint() == record.fingerprint


@pytest.mark.skipif(not AZURE.exists(), reason=f"needs {AZURE.name}")
def test_a_real_trace_runs_in_virtual_time() -> None:
    each = [Lengths(*one) for one in registry.lengths(WorkloadSpec("trace", 512, 128, 64, str(AZURE)))]
    assert len(set(each)) > 40
    planner = HostPlanner(PlannedJob(shape("facebook/opt-1.3b"), each, 64), hardware.load("laptop_cpu"))
    predicted = {
        schedule: planner.predict(OffloadPolicy(16, schedule=schedule, weights=(0.0, 0.0, 1.0))).throughput_tok_s
        for schedule in ("row", "sweep")
    }
    assert predicted["sweep"] > 1.2 * predicted["row"], "in step the short ones wait for the long ones"
