"""Records over time: appended once, told by machine and commit, and changes of level found where they are."""

import random
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from harness.api import HarnessError, RunRecord
from reports.history import History, Point, Series, open_history
from reports.publish import publish
from reports.trend import FEWEST, changes, short, trend_panel
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


def test_a_project_sees_its_own_commits_and_not_the_harnesss(history):
    """Two engines of one cell at one commit of the harness: a series each, over their own versions."""
    runs = iter(range(1, 20))
    for name, version, speed in (("mine", "v1", 2.0), ("fork", "v1", 5.0), ("mine", "v2+local", 3.0), ("", "", 4.0)):
        launches = [replace(r, started_at=f"2026-11-01T{next(runs):02}:00:00+00:00") for r in at_commit(1, (speed,))]
        assert history.add(launches, f"{name}@{version}" if name else "") == (1, 0)
    series = {s.subject: s for s in history.series()}
    assert [(p.commit, p.speeds) for p in series["mine"].points] == [("v1", (2.0,)), ("v2+local", (3.0,))]
    assert [(p.commit, p.speeds) for p in series["fork"].points] == [("v1", (5.0,))]
    assert series[""].points[0].commit == f"{1:040x}"
    assert (series["mine"].title, series[""].title) == ("accelerate-float32 of mine", "accelerate-float32")


@pytest.mark.parametrize("subject", ["mine", "@v1", "mine@", "mine@v 1", "a@b@c", "a@" + "f" * 63, "../x@1", "m@v\n"])
def test_a_subject_that_is_none_is_refused(history, subject):
    with pytest.raises(HarnessError, match="expected NAME@COMMIT"):
        history.add(at_commit(1, (2.0,)), subject)
    assert not history.series()


@pytest.mark.parametrize(
    ("commit", "shown"),
    [
        ("f" * 40, "f" * 10),
        ("f" * 40 + "+", "f" * 10 + "+"),
        ("release-2026", "release-2026"),
        ("v2.1+cu12345", "v2.1+cu12345"),
    ],
)
def test_only_hashes_are_shortened(commit, shown):
    assert short(commit) == shown


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


def test_a_machine_stays_the_same_after_an_update_of_its_kernel(history):
    """Which keeps other amounts of its memory for itself."""
    machine = PROVENANCE["machine"]
    updated = {"os": "Linux 6.99", "ram_bytes": machine["ram_bytes"] - 12_345}
    history.add([record(cell(), 0), record(cell(), 1, provenance=PROVENANCE | {"machine": machine | updated})])
    assert len(history.series()) == 1
    half = machine | {"ram_bytes": machine["ram_bytes"] // 2}
    history.add([record(cell(), 2, provenance=PROVENANCE | {"machine": half})])
    assert len(history.series()) == 2


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
        ("sqlite:///\udcff.db", "this is none"),
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


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://bob:hunter2@localhost:1/db",
        "postgresql://bob@localhost:1/db?password=hunter2&sslmode=require",
        "postgresql://bob:hunter%212@localhost:1/db?sslpassword=hunter2",
        "mssql+pyodbc:///?odbc_connect=DRIVER%3DX%3BUID%3Dbob%3BPWD%3Dhunter2",
        "postgresql://bob:p@hunter2@localhost/db",
        "postgresql://bob:hunter2",
        "postgresql://bob@localhost:hunter2/db",
        "bob:hunter2@localhost/db",
        "password=hunter2",
        "nothing://bob:hunter2@localhost/db",
        "sqlite://bob:hunter2@/:memory:",
        "sqlite:///nowhere/history.db?password=hunter2",
    ],
)
def test_a_password_is_in_no_error(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for opened in (History, open_history):
        with pytest.raises(HarnessError) as caught:
            opened(url)
        assert "hunter" not in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_password_that_a_driver_tells_is_hidden(monkeypatch):
    told = "login failed: password=hun ter!2 token abc123 (hun%20ter%212, hun+ter%212) for bob at db.example, require"

    def refuse(address):
        raise sa.exc.OperationalError("select 1", {}, Exception(told))

    monkeypatch.setattr(sa, "create_engine", refuse)
    with pytest.raises(HarnessError) as caught:
        History("postgresql://bob:hun%20ter%212@db.example/x?auth_token=abc123&sslmode=require")
    text = str(caught.value)
    assert not any(secret in text for secret in ("hun ter", "hun%20ter", "hun+ter", "abc123"))
    assert "history postgresql://bob:***@db.example/x: login failed" in text
    assert "for bob at db.example, require" in text


def test_an_open_history_names_itself_without_secrets(tmp_path):
    assert History(f"sqlite:///{tmp_path}/h.db?timeout=30").url == f"sqlite:///{tmp_path}/h.db"


@pytest.mark.parametrize("name", ["x'); drop table offload_harness_records; --", 'a" or 1=1', "100%s %(x)s :y ?", "\\"])
def test_names_are_parameters_of_statements(name, history):
    history.add([record(cell(name, suite=name)), record(cell("other", seed=1))])
    assert [s.cell for s in history.series(cell=name, suite=name)] == [name]
    assert len(history.series()) == 2


@pytest.mark.parametrize("text", ["x'ff00'", "printf('%.*c', 10001, 'x')"])
@pytest.mark.parametrize("column", ["started_at", "commit", "cell", "status"])
def test_a_text_that_is_none_is_refused(column, text, tmp_path, url):
    history = History(url)
    history.add([record(cell("a"))])
    with sqlite3.connect(tmp_path / "history.db") as connection:
        connection.execute(f'update offload_harness_records set "{column}" = {text}')
    with pytest.raises(HarnessError, match=f"{column} of record 1 is no text of ours"):
        history.series()


def test_names_are_stored_as_far_as_they_are_read_back(history):
    history.add([record(cell("n" * 300_000, suite="s" * 300_000))])
    (series,) = history.series()
    assert (series.cell, series.suite) == ("n" * 1000, "s" * 1000)


def test_a_view_that_never_ends_is_not_read(tmp_path, url):
    History(url).close()
    with sqlite3.connect(tmp_path / "history.db") as connection:
        columns = [row[1] for row in connection.execute("pragma table_info(offload_harness_records)")]
        numbers = "with recursive n(i) as (select 1 union all select i + 1 from n) select "
        connection.execute("drop table offload_harness_records")
        endless = ", ".join(f'i as "{name}"' for name in columns)
        connection.execute(f"create view offload_harness_records as {numbers}{endless} from n")
        connection.execute("create view mine as select 1")
    with pytest.raises(HarnessError, match=r"^history sqlite:.*: offload_harness_records is a view, not a table"):
        History(url)


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


def test_years_of_commits_take_no_longer_than_their_pages():
    """PELT in Python took minutes for twenty thousand."""
    series = series_of(10.0, 9.0, each=2000)
    assert [change.index for change in changes(series)] == [2000]


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


def test_a_history_is_published_as_pages_that_say_what_became_slower(history, tmp_path):
    """Two suites, of which one became 20 % slower at its seventh commit; hostile names lead nowhere."""
    for number in range(12):
        speeds = tuple(10.0 * (0.8 if number >= 6 else 1.0) * (1 + 0.002 * i) for i in range(3))
        history.add(at_commit(number, speeds))
        history.add([replace(r, spec=replace(r.spec, suite="../x", name="<b>", seed=5), fingerprint="f" * 64)
                     for r in at_commit(number, (3.0, 3.01))])  # fmt: skip
    site = tmp_path / "site"
    paths = publish(history.series(), site, library=None)
    assert sorted(p.name for p in paths) == sorted(p.name for p in site.iterdir())
    index, page = ((site / name).read_text() for name in ("index.html", "suite-demo.html"))
    assert "2 cells, slower since the last change: accelerate-float32 (0.800 since 0000000000)." in index
    assert 'href="suite-demo.html"' in index and "&lt;b&gt;" in index and "<b>" not in index
    assert "faster" not in index and "slower: 0.800 since" in page
    assert page.count('<figure class="panel"') == 1 and "accelerate-float32 over commits" in page
    assert all(path.parent == site for path in paths) and len(paths) == 3


def test_a_history_without_changes_is_published_so(history, tmp_path):
    history.add(at_commit(1, (2.0, 2.1)))
    publish(history.series(), tmp_path, library=None)
    assert "1 cell, none slower at its last change." in (tmp_path / "index.html").read_text()
