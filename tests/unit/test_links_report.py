"""What a report says of ranks over links against one node: figures per node, crossovers, the published ones."""

from dataclasses import replace

import pytest

from harness.api import HardwareLimits, Measurement, OffloadPolicy, WorkloadSpec
from reports.links import crossover, links_section, published
from reports.page import page
from reports.records import read_runs
from reports.render import markdown_of
from tests.records import assert_tables_are_whole, cell, record, write

#: Throughput by generated tokens: of one node, and of two over each link.
ALONE = {2: 4.0, 8: 10.0, 32: 20.0}
FAST, SLOW = {2: 16.0, 8: 24.0, 32: 32.0}, {2: 4.0, 8: 8.0, 32: 10.0}
LINKS = {(0.005, 10**9): FAST, (0.1, 10**8): SLOW}


def measured(limits):
    return (
        Measurement("link_delay_s", "s", (limits.link_delay_s * 1.1,) * 3, "load", "by a relay process"),
        Measurement("link_bit_s", "bit/s", (limits.link_rate * 0.9,), "load", "one connection of TCP"),
    )


def launches():
    found = []
    for length, speed in ALONE.items():
        found.append(record(cell(f"alone-{length}", "offload", workload=WorkloadSpec(gen_len=length)), speed=speed))
    for (delay, rate), speeds in LINKS.items():
        limits = HardwareLimits(link_rate=rate, link_delay_s=delay)
        for length, speed in speeds.items():
            workload = WorkloadSpec(gen_len=length)
            spec = cell(f"two-{delay}-{workload.label}", "offload", workload=workload, limits=limits)
            spec = replace(spec, policy=OffloadPolicy(pipeline=2, wire_bits=8))
            found.append(record(spec, speed=speed, measurements=measured(limits)))
    return found


def texts(rows):
    return [[c.text for c in line] for line in rows]


def test_each_link_is_shown_beside_one_node_with_where_they_cross(tmp_path):
    runs = read_runs([write(tmp_path / "run", launches())])
    figures, crossings, _ = links_section(runs).tables
    fast, slow = figures.bodies
    assert fast.heading == "5 ms, 1 Gbit/s: measured 5.5 ms and 900 Mbit/s, by a relay process"
    assert slow.heading.startswith("100 ms, 100 Mbit/s: measured 110 ms and 90 Mbit/s")
    assert texts(fast.rows)[1] == ["8", "two-0.005-p128g8", "2.67", "12", "6.40", "10", "1.20"]  # of 64 tokens
    assert [line[-1] for line in texts(fast.rows)] == ["2.00", "1.20", "0.80"]
    (row,) = crossings.bodies
    assert texts(row.rows) == [
        ["5 ms, 1 Gbit/s", "two-0.005", "ranks over links, at every length",
         "ranks over links to about 19 tokens, then one node"],
        ["100 ms, 100 Mbit/s", "two-0.1", "ranks over links to about 2 tokens, then one node",
         "one node, at every length"],
    ]  # fmt: skip
    text = markdown_of("report.md", page=page(runs))
    assert "### Slow links" in text
    assert_tables_are_whole(text)


def test_cells_of_one_link_with_other_settings_are_crossed_apart(tmp_path):
    """Each of twice the throughput of one node, or of half of it."""
    limits = HardwareLimits(link_rate=10**9)
    records = [record(cell(f"alone-{n}", "offload", workload=WorkloadSpec(gen_len=n)), speed=4.0) for n in (2, 8)]
    for name, policy, speed in (
        ("stages", OffloadPolicy(pipeline=2), 16.0), ("shards", OffloadPolicy(tensor=2), 4.0),
        ("wired", OffloadPolicy(pipeline=2, wire_bits=8), 4.0),
    ):  # fmt: skip
        for n in (2, 8):
            workload = WorkloadSpec(gen_len=n)
            spec = cell(f"{name}-{workload.label}", "offload", workload=workload, limits=limits, policy=policy)
            records.append(record(spec, speed=speed, measurements=()))
    section = links_section(read_runs([write(tmp_path / "run", records)]))
    rows = texts(section.tables[1].bodies[0].rows)
    assert {row[1]: row[3].partition(",")[0] for row in rows} == {
        "stages": "ranks over links", "shards": "one node", "wired": "one node"
    }  # fmt: skip
    curves = [point["cell"] for point in section.panels[1].spec["data"]["values"]]
    assert sorted(curves) == sorted(["stages", "shards", "wired", "one node"] * 2)


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ([(4, 2.0)], "a, at every length"),
        ([(4, 0.5), (8, 0.9)], "b, at every length"),
        ([(4, 0.5), (8, 2.0)], "b to about 6 tokens, then a"),
        ([(4, 4.0), (10, 0.5), (16, 4.0)], "a to about 8 tokens, b to about 12 tokens, then a"),
    ],
)
def test_a_crossover_is_where_the_logarithm_of_the_ratio_is_zero(ratios, words):
    assert crossover(ratios, "a", "b") == words


def test_the_published_ones_are_those_of_the_paper():
    rows = [line for line in texts(published().bodies[0].rows) if line[0] == "opt-30b"]
    assert [(link, petals, flexgen) for _, link, petals, flexgen, _ in rows] == [
        ("<5ms 1Gb/s", "2.84", "7.32"), ("<5ms 100Mb/s", "1.67", "7.32"), ("100ms 100Mb/s", "0.64", "7.32")
    ]  # fmt: skip
    assert len(published().bodies[0].rows) == 9


def test_a_report_without_links_says_nothing_of_them(tmp_path):
    runs = read_runs([write(tmp_path / "run", [record(cell())])])
    assert links_section(runs) is None
    assert "Slow links" not in markdown_of("report.md", page=page(runs))
