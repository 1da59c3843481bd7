"""What a report says of ranks of one host: against one rank, and what each rank did."""

from dataclasses import replace

import pytest

from harness.api import Forecast, HardwareLimits, OffloadPolicy, RequestTrace
from reports.page import page
from reports.ranks import decode_rate, ranks_tables
from reports.records import read_runs
from reports.render import markdown_of
from reports.text import MISSING
from tests.records import assert_tables_are_whole, cell, record, write


def launch(ranks, repeat, speed, idle):
    """Of ranks that were idle for so much of the time, each predicted to be idle for half as much."""
    spec = replace(cell(f"ranks-{ranks}", "offload"), policy=OffloadPolicy(schedule="row", pipeline=ranks))
    made = record(spec, repeat, speed)
    did = {f"rank{k}_idle_share": idle + 0.1 * k for k in range(ranks)} if ranks > 1 else {}
    did |= {f"rank{k}_busy_s": 2.0 + k for k in range(ranks)} if ranks > 1 else {}
    sent = {f"rank{k}_sent_bytes": 3e6 for k in range(1, ranks)}
    forecast = Forecast("here", speed * 1.1, {name: value / 2 for name, value in did.items()})
    # two requests, whose first tokens come after 1 and 2 s; then two tokens a step, in 1.6 / speed s
    later = [2 + 1.6 * (k + 1) / speed for k in range(3)]
    requests = tuple(RequestTrace(str(i), 4, 4, 0, 0.0, (1.0 + i, *later), "length", "d") for i in range(2))
    made = replace(made, requests=requests)
    return replace(made, metrics={**made.metrics, **did, **sent}, predicted=forecast)


def texts(rows):
    return [[c.text for c in line] for line in rows]


def test_ranks_are_set_beside_one_with_and_without_the_prefill(tmp_path):
    records = [launch(1, i, 2.0 + i, 0.0) for i in range(3)]
    records += [launch(2, i, 9.0, share) for i, share in enumerate((0.1, 0.2, 0.6))]
    linked = replace(
        cell("linked", "offload"), policy=OffloadPolicy(pipeline=2), limits=HardwareLimits(link_rate=10**9)
    )
    runs = read_runs([write(tmp_path / "run", [*records, record(linked)])])
    against, by_rank = ranks_tables(runs)
    assert "its 8 cores" in against.caption
    (body,) = against.bodies
    # of three launches of one rank the median is 3 tokens/s, and each decodes a quarter faster
    assert texts(body.rows) == [
        ["ranks-1", "1", "3", "3.30", "3.75", "1", "1.00", MISSING, MISSING],
        ["ranks-2", "2", "9", "9.90", "11.25", "3", "3.00", "25", "12.5"],
    ]
    (two,) = by_rank.bodies
    assert two.heading == "ranks-2", "one rank has no ranks to tell apart, and links have a section of their own"
    assert texts(two.rows) == [
        ["rank 0", "2", "20.0", "10.0", MISSING, MISSING],
        ["rank 1", "3", "30.0", "15.0", "3", MISSING],
    ]
    text = markdown_of("report.md", page=page(runs))
    assert "### Ranks" in text
    assert_tables_are_whole(text)


def test_ranks_without_one_to_be_compared_with_have_no_ratio(tmp_path):
    runs = read_runs([write(tmp_path / "run", [launch(2, 0, 9.0, 0.1)])])
    assert texts(ranks_tables(runs)[0].bodies[0].rows)[0][5:7] == [MISSING, MISSING]
    alone = read_runs([write(tmp_path / "alone", [launch(1, 0, 9.0, 0.1)])])
    assert ranks_tables(alone) == ()
    assert "### Ranks" not in markdown_of("report.md", page=page(alone))


def test_decode_throughput_is_what_comes_after_the_last_first_token():
    times = ((1.0, 2.0, 3.0, 5.0), (2.5, 3.5, 5.5))  # of the first request's tokens one came before
    requests = tuple(RequestTrace(str(i), 4, len(t), 0, 0.0, t, "length", "d") for i, t in enumerate(times))
    assert decode_rate([record(cell(), requests=requests)]) == pytest.approx(4 / 3.0)
    assert decode_rate([record(cell(), requests=(), speed=2.0)]) == 2.5, "a simulated one's own"
