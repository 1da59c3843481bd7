"""The history in a real PostgreSQL: a private server of Debian's package, on a socket of its own."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from harness.api import HarnessError
from reports.history import History
from tests.records import PROVENANCE, cell, record, write

pytestmark = pytest.mark.slow


def _server() -> Path | None:
    """Where the server's programs are."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda f: int(f.parent.name))
    return next((f for f in reversed(folders) if (f / "initdb").exists()), None)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    programs = _server()
    if programs is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no PostgreSQL here: apt-get install postgresql")
    pytest.importorskip("psycopg")
    folder = Path(tempfile.mkdtemp(prefix="postgresql-", dir="/tmp"))  # a socket's path is short
    user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name  # it refuses to run as root
    shutil.chown(folder, user)

    def run(*command: str | Path) -> None:
        before = ["runuser", "-u", user, "--"] if os.geteuid() == 0 else []
        subprocess.run([*before, *command], check=True, cwd=folder, stdout=subprocess.DEVNULL)

    run(programs / "initdb", "-D", folder / "data", "-A", "trust", "-U", "bench", "--no-sync")
    options = f"-k {folder} -c listen_addresses= -c fsync=off"
    run(programs / "pg_ctl", "-D", folder / "data", "-o", options, "-l", folder / "log", "-w", "start")
    try:
        yield f"postgresql+psycopg://bench@/postgres?host={folder}"
    finally:
        run(programs / "pg_ctl", "-D", folder / "data", "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder)


def test_what_was_added_is_found_by_another_process(url, cli):
    records = [record(cell(), i, 2.0 + i / 10, provenance=_at("a" * 40)) for i in range(3)]
    records += [record(cell(), i, 3.0, provenance=_at("b" * 40)) for i in range(3, 5)]
    run = write(cli.folder / "run", records)
    for counts in ("5 added, 0 already there", "0 added, 5 already there"):
        assert counts in cli("history", "add", run, "--db", url).stdout
    (series,) = History(url).series()
    assert [p.speeds for p in series.points] == [(2.0, 2.1, 2.2), (3.0, 3.0)]
    shown = cli("history", "show", "--db", url)
    assert "2.10 tok/s of 3" in shown.stdout
    cli("history", "trend", "--db", url)
    cli("report", run, "--history", url)
    assert 'id="trends"' in (run / "report.html").read_text()


def test_many_and_odd_records(url):
    history = History(url)
    odd = cell("a name\x00 with\n'quotes\"; drop table offload_harness_records; --", seed=7)
    many = [record(odd, i, 2.0, requests=(), measurements=()) for i in range(1203)]
    assert history.add(many) == (1203, 0)
    assert history.add(many) == (0, 1203)
    (found,) = History(url).series([odd.fingerprint()])
    assert len(found.points[0].speeds) == 1203


def test_a_database_that_is_not_there(url):
    with pytest.raises(HarnessError, match='database "nothing" does not exist') as caught:
        History(url.replace("/postgres?", "/nothing?"))
    assert "\n" not in str(caught.value)


def _at(commit: str) -> Mapping[str, object]:
    return PROVENANCE | {"git": {"commit": commit, "dirty": False}}
