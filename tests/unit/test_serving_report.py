"""Reports of online workloads: every rate with its latencies, the highest rate within the objectives, and the queue."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.api import RunRecord, ServedRate, ServedRequest, Slo, WorkloadSpec
from harness.run.online import metrics_of
from reports.page import page
from reports.quantiles import quantile_interval
from reports.records import Runs, workload_of
from reports.samples import speed_of, unit_of
from reports.serving import in_system, serving_panels
from reports.summary import summary_rows
from reports.text import MISSING
from reports.vega import Panel
from tests.records import cell, record, report

SLO = Slo(normalized_s=0.2, attainment="mean")


def served(rate: float, latency: float, count: int = 40) -> ServedRate:
    """Requests of two tokens with a mean normalized latency of about `latency`."""
    requests = [
        ServedRequest(f"c{i}", i / rate, i / rate, 5, (i / rate + latency, i / rate + 2 * latency), i / rate)
        for i in range(count)
    ]
    return ServedRate(rate, count / rate, tuple(requests))


def swept(engine: str, repeat: int, *rates: ServedRate, slo: Slo | None = SLO, **keys: Any) -> RunRecord:
    workload = WorkloadSpec("arrivals", 8, 2, rate="sweep", duration_s=9.0, slo=slo, **keys)
    base = record(cell(engine, engine, workload=workload), repeat)
    return replace(base, requests=(), served=rates, metrics=metrics_of(rates, slo, True))


def panels(*records: RunRecord) -> dict[str, Panel]:
    return {panel.title: panel for panel in serving_panels(summary_rows(records))}


def lines(panel: Panel) -> list[list[str]]:
    assert panel.table is not None
    return [[c.text for c in row] for body in panel.table.bodies for row in body.rows]


def two_engines() -> list[RunRecord]:
    found = []
    for repeat in range(3):
        found.append(swept("ours", repeat, served(4.0, 0.05), served(8.0, 0.1), served(16.0, 0.5)))
        found.append(swept("theirs", repeat, served(4.0, 0.1), served(8.0, 0.4)))
    return found


def test_the_highest_rates_are_compared_with_the_best_rival() -> None:
    ours, theirs = lines(panels(*two_engines())["Highest rate within the objectives"])
    assert ours[:4] == ["ours", "8", "8.00 to 8.00", "2 [2.00, 2.00]"]
    assert theirs[:3] == ["theirs", "4", "4 to 4"]
    assert theirs[3].startswith("0.500 [")


def test_a_launch_without_any_rate_within_leaves_no_interval_and_no_ratio() -> None:
    """Those that found one would speak for it."""
    records = two_engines()
    records[0] = swept("ours", 0, served(4.0, 0.5))
    ours, theirs = lines(panels(*records)["Highest rate within the objectives"])
    assert ours[:4] == ["ours", "8", MISSING, MISSING]
    assert theirs[:4] == ["theirs", "4", "4 to 4", MISSING]


def test_cells_with_other_objectives_are_no_rivals() -> None:
    """A higher rate within looser objectives is none."""
    loose = Slo(normalized_s=9.0, attainment="mean")
    records = [swept("ours", i, served(4.0, 0.05), served(8.0, 0.1)) for i in range(3)]
    records += [swept("theirs", i, served(4.0, 0.05), served(8.0, 0.1), served(16.0, 0.5), slo=loose) for i in range(3)]
    assert len({workload_of(r) for r in records}) == 2
    assert "within normalized_s 0.2 (mean)" in workload_of(records[0])
    for workload in page(Runs(tuple(records)))["workloads"]:
        (highest,) = (table for table in workload["served"] if table.caption.startswith("Highest rate"))
        assert [row[3].text for row in highest.bodies[0].rows] == [MISSING]


def test_every_rate_has_a_line_and_a_point_and_the_objective_a_rule() -> None:
    panel = panels(*two_engines())["Latency against rate"]
    assert [line[1] for line in lines(panel)] == ["4", "8", "16", "4", "8"]
    assert [line[2] for line in lines(panel)] == ["120"] * 5
    points = panel.spec["data"]["values"]
    assert [(p["cell"], p["rate"], p["value"]) for p in points] == [
        ("ours", 4.0, pytest.approx(0.05)), ("ours", 8.0, pytest.approx(0.1)), ("ours", 16.0, pytest.approx(0.5)),
        ("theirs", 4.0, pytest.approx(0.1)), ("theirs", 8.0, pytest.approx(0.4)),
    ]  # fmt: skip
    assert panel.spec["layer"][-1]["data"]["values"][0]["value"] == 0.2
    assert "objective" in panel.note
    without = panels(swept("ours", 0, served(4.0, 0.1), served(8.0, 0.1), slo=None))
    assert "objective" not in without["Latency against rate"].note
    assert "Highest rate within the objectives" not in without


def test_requests_without_an_answer_are_counted_beside_the_latencies_that_lack_them() -> None:
    whole = served(8.0, 0.1)
    lossy = replace(
        whole, requests=tuple(replace(r, outcome="refused") for r in whole.requests[:3]) + whole.requests[3:]
    )
    found = panels(swept("ours", 0, served(4.0, 0.1), lossy, slo=Slo(normalized_s=0.2)))
    assert [line[2:4] for line in lines(found["Latency against rate"])] == [["40", "0"], ["40", "3"]]
    assert " 3 of 80 requests were not answered: they have no latency." in found["Latency against rate"].note
    assert " 3 of 40 requests were not answered" in found["Token latency"].note
    answered = panels(*two_engines())
    assert not any("not answered" in answered[title].note for title in ("Latency against rate", "Token latency"))


def test_a_rate_says_how_many_of_all_its_requests_were_within() -> None:
    """A refused request is not within, whatever the others are."""
    whole = served(4.0, 0.1)
    refused = (*(replace(r, outcome="refused") for r in whole.requests[:10]), *whole.requests[10:])
    found = panels(swept("ours", 0, replace(whole, requests=refused), served(8.0, 0.1), served(16.0, 0.5)))
    assert [line[-1] for line in lines(found["Latency against rate"])] == ["75", "100", "0"]


def test_loads_without_a_rate_say_what_they_are() -> None:
    alone = panels(swept("ours", 0, replace(served(4.0, 0.1), rate=0.0), served(8.0, 0.1)))
    assert [line[1] for line in lines(alone["Latency against rate"])] == ["alone", "8"]
    workload = WorkloadSpec("arrivals", 8, 2, concurrency=4, num_requests=40)
    loop = replace(served(4.0, 0.1), rate=None)
    closed = replace(record(cell("ours", "ours", workload=workload)), requests=(), served=(loop,),
                     metrics=metrics_of((loop,), None, False))  # fmt: skip
    assert [line[1] for line in lines(panels(closed)["Latency against rate"])] == ["closed loop"]


def test_conversations_show_by_round_what_a_cache_spared() -> None:
    def turns(spared: int | None) -> ServedRate:
        requests = [
            ServedRequest(f"c{i}-{turn}", i, i, 100 * (turn + 1), (i + 0.5 - 0.2 * turn, i + 1.0), i, round=turn,
                          cached_tokens=None if spared is None else spared * turn)
            for i in range(4) for turn in range(2)
        ]  # fmt: skip
        return ServedRate(2.0, 4.0, tuple(requests))

    kinds = {"rounds": 2}
    runs = swept("ours", 0, turns(80), **kinds), swept("theirs", 0, turns(None), **kinds)
    panel = panels(*runs)["Conversations by round"]
    first, second, other = lines(panel)[:3]
    assert first == ["ours", "1", "4", "100", "100", "0", "0.500", "0.500"]
    assert second == ["ours", "2", "4", "200", "120", "40", "0.300", "0.300"]
    assert other[:4] == ["theirs", "1", "4", "100"] and other[4] == other[5] == MISSING
    points = panel.spec["data"]["values"]
    assert [(p["cell"], p["round"]) for p in points] == [("ours", 1), ("ours", 2), ("theirs", 1), ("theirs", 2)]
    assert [p["value"] for p in points] == pytest.approx([0.5, 0.3, 0.5, 0.3])
    assert "Conversations by round" not in panels(*two_engines())


def test_token_latencies_are_those_near_nine_tenths_of_the_highest_rate() -> None:
    table = lines(panels(*two_engines())["Token latency"])
    assert {(line[0], line[1]) for line in table} == {("ours", "8"), ("theirs", "4")}
    between = next(line for line in table if line[0] == "ours" and line[2] == "between tokens")
    assert between[3].startswith("0.1")
    assert between[-1] == "1.00"


def test_other_workloads_have_no_such_panels() -> None:
    assert panels(record(cell())) == {}


def test_requests_are_in_the_system_from_due_to_their_last_token() -> None:
    first = ServedRequest("a", 0.0, 0.0, 1, (1.0, 3.0))
    second = ServedRequest("b", 2.0, 2.0, 1, (4.0,))
    lost = ServedRequest("c", 2.5, 2.6, 1, outcome="refused")
    steps = in_system(ServedRate(1.0, 3.0, (first, second, lost)))
    assert steps[:-1] == [(0.0, 1), (2.0, 2), (2.5, 3), (2.6, 2), (3.0, 1), (4.0, 0)]


@given(st.integers(1, 200), st.sampled_from([0.5, 0.9, 0.99]))
def test_an_interval_of_a_quantile_holds_it_or_there_is_none(n: int, q: float) -> None:
    found = quantile_interval(list(range(n)), q)
    assert (found is None) == (n < {0.5: 6, 0.9: 36, 0.99: 368}[q])
    if found:
        assert found[0] <= q * n <= found[1] + 1


def test_impossible_times_of_a_record_are_left_out() -> None:
    whole = served(4.0, 0.1, 12)
    endless = replace(whole.requests[0], due_s=float("inf"))
    empty = replace(whole.requests[1], token_times_s=())
    odd = replace(whole, requests=(endless, empty, *whole.requests[2:]))
    bad = replace(swept("ours", 0, whole), served=(odd, replace(whole, rate=1e308)))
    assert [line[1:3] for line in lines(panels(bad)["Latency against rate"])] == [["4", "11"]]


def test_rates_of_requests_are_better_when_they_are_higher() -> None:
    fast = swept("ours", 0, served(4.0, 0.1))
    assert speed_of(fast, "highest_req_s") == fast.metrics["highest_req_s"] == 4.0
    assert unit_of("highest_req_s", [fast]) == "req/s"
    assert unit_of("ttft_p99_s", [fast]) == "s"


def test_a_report_shows_the_notes_of_launches(tmp_path: Path) -> None:
    late = replace(swept("ours", 0, served(4.0, 0.1)), notes=("the load generator was late",))
    shown: Any = page(Runs((late,)))
    assert "ours: the load generator was late." in shown["workloads"][0]["remarks"]
    assert {p.title for p in shown["workloads"][0]["panels"]} >= {"Latency against rate", "Requests in the system"}
    assert [table.caption for table in shown["workloads"][0]["served"]] == [
        "Latency against rate", "Highest rate within the objectives"
    ]  # fmt: skip
    assert "Highest rate within the objectives:" in report(tmp_path, [late], "md")
    assert "Requests in the system" in report(tmp_path, [late], "html")
