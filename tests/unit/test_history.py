"""Records over time: appended once, told by machine and commit, and changes of level found where they are."""

import random
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.api import HarnessError, RunRecord
from reports.history import History, Point, Series
from reports.trend import FEWEST, changes, trend_panel
from tests.records import PROVENANCE, beside, cell, failed, record, repeats, report


def at_commit(number: int, speeds: tuple[float, ...], dirty: bool = False) -> list[RunRecord]:
    """Launches of one cell at the `number`-th commit, an hour after those before."""
    known = PROVENANCE | {"git": {"commit": f"{number:040x}", "dirty": dirty}}
    return [
        replace(r, started_at=f"2026-11-{1 + number // 24:02}T{number % 24:02}:{r.repeat:02}:00+00:00")
        for r in repeats(cell(), speeds, provenance=known)
    ]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/history.db"


@pytest.fixture
def history(url: str) -> History:
    return History(url)


def test_the_same_launch_is_added_once(history, url):
    assert history.add(at_commit(1, (2.0, 2.1))) == (2, 0)
    assert history.add([*at_commit(1, (2.0, 2.1)), *at_commit(2, (2.2,))]) == (1, 2)
    (series,) = History(url).series()  # another process
    assert [p.speeds for p in series.points] == [(2.0, 2.1), (2.2,)]
    assert (series.cell, series.suite, series.engine) == ("accelerate-float32", "demo", "accelerate")


def test_interrupted_and_simulated_launches_are_not_added(history):
    interrupted = failed(cell(), "interrupted", "", 0)
    assert history.add([interrupted, record(cell(), simulated=True)]) == (0, 0)


def test_failures_are_kept_without_a_figure(history):
    known = PROVENANCE | {"git": {"commit": "a" * 40, "dirty": True}}
    history.add([record(cell(), 0, 2.0, provenance=known), failed(cell(), "oom_host", "", 1, provenance=known)])
    (series,) = history.series()
    assert [(p.commit, p.speeds, p.failed) for p in series.points] == [("a" * 40 + "+", (2.0,), 1)]


def test_disturbed_launches_are_counted_and_left_out_unless_all_were(history):
    *quiet, slow = at_commit(1, (2.0, 2.1, 0.4))
    history.add([*quiet, *(beside(9.0, r) for r in (slow, *at_commit(2, (0.5, 0.6))))])
    (series,) = history.series()
    assert [(p.speeds, p.disturbed, p.failed) for p in series.points] == [((2.0, 2.1), 1, 0), ((0.5, 0.6), 2, 0)]
    rows = trend_panel(series).table.bodies[0].rows
    assert [[c.text for c in row][4:7] for row in rows] == [["2", "1", "0"], ["2", "2", "0"]]


def test_machines_and_cells_have_series_of_their_own(history):
    other = PROVENANCE | {"machine": PROVENANCE["machine"] | {"cores_usable": 2}}
    history.add([record(cell(), 0), record(cell(), 1, provenance=other), record(cell("b", seed=1))])
    assert len(history.series()) == 3
    assert [s.cell for s in history.series(cell="b")] == ["b"]
    assert history.series(suite="none") == []
    assert len(history.series([cell().fingerprint()])) == 2


def test_without_commits_a_day_is_a_point(history):
    history.add([record(cell(), provenance={"git": "?"}, started_at=f"2026-11-0{day}T05:00:00") for day in (1, 2, 3)])
    (series,) = history.series()
    days = [f"no commit, 2026-11-0{day}" for day in (1, 2, 3)]
    assert [p.commit for p in series.points] == days
    assert [d["commit"] for d in trend_panel(series).spec["data"]["values"]] == days


def test_many_records_at_once(history):
    many = [record(cell(), i, 2.0, requests=(), measurements=()) for i in range(1203)]
    assert history.add(many) == (1203, 0)
    assert history.add(many) == (0, 1203)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "sqlite:///results/history.db"),
        ("oracle+nothing://host/db", "--db"),
        ("postgresql://host:abc/db", "--db"),
        ("sqlite:////no/such/folder/history.db", "unable to open"),
        ("sqlite:///text.db", "not a database"),
        ("postgresql://user:secret@localhost:1/db", "psycopg"),
    ],
)
def test_databases_that_cannot_be_opened(tmp_path, monkeypatch, url, message):
    monkeypatch.chdir(tmp_path)
    Path("text.db").write_text("not a database" * 100)
    monkeypatch.setitem(sys.modules, "psycopg", None)  # a driver that is not there
    with pytest.raises(HarnessError, match=message) as caught:
        History(url)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_a_newer_database_is_refused(tmp_path, url):
    History(url).close()
    with sqlite3.connect(tmp_path / "history.db") as connection:
        connection.execute("update offload_harness_schema set version = 9")
    with pytest.raises(HarnessError, match=r"newer harness \(schema 9"):
        History(url)


def series_of(*levels: float, each: int, noise: float = 0.01, seed: int = 0) -> Series:
    """So many commits at each level, five launches a commit."""
    rng = random.Random(seed)
    points = [
        Point(f"{i:040x}", "", tuple(level * (1 + rng.gauss(0, noise)) for _ in range(5)), 0, 0)
        for i, level in enumerate(level for level in levels for _ in range(each))
    ]
    return Series("demo", "c", "offload", "w", "f", "m", tuple(points))


@pytest.mark.parametrize("seed", range(20))
def test_a_level_that_stays_has_no_change(seed):
    assert changes(series_of(10.0, each=30, noise=0.03, seed=seed)) == []


def test_no_change_is_found_without_noise_in_a_small_step_or_in_few_commits():
    assert changes(series_of(10.0, each=12, noise=0.0)) == []
    assert changes(series_of(10.0, 9.8, each=15, noise=1e-4)) == []  # however sure it is
    assert changes(series_of(10.0, 5.0, each=(FEWEST - 1) // 2)) == []


@pytest.mark.parametrize("seed", range(20))
def test_changes_are_found_where_they_are(seed):
    found = changes(series_of(10.0, 9.0, 11.0, each=10, seed=seed))
    assert [(c.index, c.commit) for c in found] == [(i, f"{i:040x}") for i in (10, 20)]
    assert [c.ratio for c in found] == pytest.approx([0.9, 11 / 9], rel=0.02)


def test_commits_without_a_figure_are_passed_over():
    series = series_of(10.0, 8.0, each=6)
    points = [*series.points[:3], Point("f" * 40, "", (), 5, 0), *series.points[3:]]
    assert [c.index for c in changes(replace(series, points=tuple(points)))] == [7]


def test_the_report_shows_trends(tmp_path, history, url):
    for i in range(12):
        history.add(at_commit(i, (10.0, 10.1, 9.9) if i < 6 else (8.0, 8.1, 7.9)))
    records = at_commit(12, (8.0, 8.1))
    document = report(tmp_path / "run", records, history=url)
    assert 'id="trends"' in document and "slower: 0.800" in document
    (series,) = history.series()
    panel = trend_panel(series)
    assert [d["changed"] for d in panel.spec["data"]["values"]].count(True) == 1
    assert 'id="trends"' not in report(tmp_path / "run", records)
