"""An append-only store of records over time, in SQLite or any database that SQLAlchemy supports."""

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from harness.api import HarnessError, RunRecord, first_line, to_json
from harness.common.files import os_errors
from harness.common.packages import install
from reports.database_url import parse_url, shown, without_secrets_of
from reports.environment import machine_of
from reports.records import name_of, workload_of
from reports.summary import throughput
from reports.text import finite, grouped, one_line

#: Characters of a commit, as the table holds it, and what a user may give in its place.
_LONGEST_COMMIT = 64
_SUBJECT = re.compile(rf"(?=.{{3,{_LONGEST_COMMIT}}}$)[A-Za-z0-9][\w.+-]*@[A-Za-z0-9][\w.+-]*", re.ASCII)
#: Characters of a name that are stored, and of any text that is read back.
_LONGEST_NAME, _LONGEST_TEXT = 1000, 10_000
#: Version of the tables below; a database with a newer version is refused.
SCHEMA = 1
#: The most values in a statement, which databases limit.
_MOST_VALUES = 500
#: What the store holds as the status of launches that ended ok and that others disturbed.
_DISTURBED = "disturbed"
_METADATA = sa.MetaData()
_SCHEMA = sa.Table("offload_harness_schema", _METADATA, sa.Column("version", sa.Integer, primary_key=True))
_RECORDS = sa.Table(
    "offload_harness_records",
    _METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("key", sa.String(64), nullable=False, unique=True),  # identifies the launch, so that it is added once
    sa.Column("started_at", sa.String(40), nullable=False),  # ISO 8601 in UTC, sorts as text
    sa.Column("commit", sa.String(64), nullable=False),
    sa.Column("dirty", sa.Boolean, nullable=False),
    sa.Column("machine", sa.String(16), nullable=False),
    sa.Column("suite", sa.Text, nullable=False),
    sa.Column("cell", sa.Text, nullable=False),
    sa.Column("engine", sa.Text, nullable=False),
    sa.Column("workload", sa.Text, nullable=False),
    sa.Column("fingerprint", sa.String(64), nullable=False, index=True),
    sa.Column("status", sa.String(20), nullable=False),  # or _DISTURBED
    sa.Column("tok_s", sa.Float),
    sa.Column("record", sa.Text, nullable=False),
)


@dataclass(frozen=True)
class Point:
    """The launches of a cell at a commit on a machine. `started_at` is that of the first launch; speeds in tok/s.

    `speeds` leaves out launches that others disturbed, unless all were.
    """

    commit: str
    started_at: str
    speeds: tuple[float, ...]
    failed: int
    disturbed: int


@dataclass(frozen=True)
class Series:
    """A cell on a machine over commits, in the order of their first launches.

    `subject`: the project whose commits they are, as its name was given; empty for the harness's own.
    """

    suite: str
    cell: str
    engine: str
    workload: str
    fingerprint: str
    machine: str
    points: tuple[Point, ...]
    subject: str = ""

    @property
    def title(self) -> str:
        """The cell, and the subject whose commits these are; without a subject they are the harness's own."""
        return f"{self.cell} of {self.subject}" if self.subject else self.cell


class History:
    """The store at `url`, created if it does not exist.

    Raises HarnessError for an invalid URL, a database that cannot be opened, views in place of tables, and a newer
    schema. `url` as an attribute is without secrets, as are all errors.
    """

    def __init__(self, url: str) -> None:
        self._address = parse_url(url)
        self.url = shown(self._address)
        with _one_line(self._address):
            self._engine = sa.create_engine(self._address)
        with _one_line(self._address), self._engine.begin() as connection:
            if views := set(sa.inspect(connection).get_view_names()) & set(_METADATA.tables):
                # what a view computes may never end, and is not what anybody recorded
                raise HarnessError(f"history {self.url}: {min(views)} is a view, not a table; name another by --db")
            _METADATA.create_all(connection)
            stored = connection.execute(sa.select(_SCHEMA.c.version)).scalar()
            if stored is None:
                connection.execute(_SCHEMA.insert().values(version=SCHEMA))
            elif stored > SCHEMA:
                raise HarnessError(
                    f"{self.url} is of a newer harness (schema {stored}, this one has {SCHEMA}): update the harness"
                )

    def add(self, records: Iterable[RunRecord], subject: str = "") -> tuple[int, int]:
        """Appends new records and returns (number added, number already stored). Skips interrupted and simulated
        launches, which have no place in a trend.

        `subject`, `NAME@COMMIT`, says what was measured where it is not this harness: a project's own engine at a
        commit or version of its own. Raises HarnessError for one that is malformed.
        """
        if subject and not _SUBJECT.fullmatch(subject):
            raise HarnessError(f"--subject {subject}: expected NAME@COMMIT, such as my-engine@1f2e3d4 or mine@v2.1, "
                               f"of at most {_LONGEST_COMMIT} letters, digits, '.', '_', '+' and '-'")  # fmt: skip
        added = (r for r in records if r.status != "interrupted" and not r.simulated)
        rows = {row["key"]: row for row in (_row(r, subject) for r in added)}
        with _one_line(self._address), self._engine.begin() as connection:
            known: set[str] = set()
            keys = list(rows)
            for i in range(0, len(keys), _MOST_VALUES):
                stored = sa.select(_RECORDS.c.key).where(_RECORDS.c.key.in_(keys[i : i + _MOST_VALUES]))
                known.update(connection.execute(stored).scalars())
            new = [row for key, row in rows.items() if key not in known]
            if new:
                connection.execute(_RECORDS.insert(), new)
        return len(new), len(known)

    def series(self, fingerprints: Collection[str] = (), cell: str = "", suite: str = "") -> list[Series]:
        """The series of each cell and machine, filtered by fingerprints, cell name and suite (empty: all)."""
        query = sa.select(*(c for c in _RECORDS.c if c.name != "record")).order_by(_RECORDS.c.started_at, _RECORDS.c.id)
        for column, value in ((_RECORDS.c.cell, cell), (_RECORDS.c.suite, suite)):
            query = query.where(column == value) if value else query
        if 0 < len(fingerprints) <= _MOST_VALUES:
            query = query.where(_RECORDS.c.fingerprint.in_(fingerprints))
        with _one_line(self._address), self._engine.connect() as connection:
            rows = [self._whole(dict(row._mapping)) for row in connection.execute(query)]
        selected = (row for row in rows if not fingerprints or row["fingerprint"] in fingerprints)
        groups = grouped(selected, lambda row: (row["fingerprint"], row["machine"], _subject(row)))
        return [_series(group) for group in groups.values()]

    def _whole(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row whose texts are texts, and short ones: SQLite keeps in a column what anybody writes there."""
        for name in (c.name for c in _RECORDS.c if c.name in row and isinstance(c.type, sa.String)):
            if not isinstance(row[name], str) or len(row[name]) > _LONGEST_TEXT:
                raise HarnessError(f"history {self.url}: {name} of record {row['id']} is no text of ours")
        return row

    def close(self) -> None:
        """Closes the connections."""
        self._engine.dispose()


def open_history(url: str, make: bool = False) -> History:
    """Opens the store at `url`; creates a missing SQLite file only with `make`.

    Raises HarnessError for a missing file and an in-memory database, and as History does.
    """
    address = parse_url(url)
    if address.get_backend_name() == "sqlite":
        path = Path(address.database or ":memory:")
        if path.name == ":memory:":
            example = "name a file: sqlite:///results/history.db"
            raise HarnessError(f"history {shown(address)}: a database in memory is lost at exit; {example}")
        if not make and not path.exists():
            raise HarnessError(f"no history in {path}; `harness history add DIR` creates one, --db names another")
        with os_errors(f"cannot create {path.parent}", "choose another place with --db"):
            path.parent.mkdir(parents=True, exist_ok=True)
    return History(url)


def _row(record: RunRecord, subject: str) -> dict[str, Any]:
    """A record as a row of the table; a `subject` takes the place of the harness's commit."""
    git = record.provenance.get("git")
    git = git if isinstance(git, Mapping) else {}
    started = one_line(record.started_at)
    # a harness installed from a package records no commit: the day stands for it
    commit = one_line(str(git.get("commit") or "")) or f"no commit, {started[:10]}"
    identity = [record.fingerprint, record.repeat, record.started_at, git.get("commit"), record.wall_s]
    return {
        "key": hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        "started_at": started[:40],
        "commit": subject or commit[:_LONGEST_COMMIT],
        "dirty": bool(git.get("dirty")) and not subject,
        "machine": hashlib.sha256(json.dumps(_lasting(machine_of(record)), sort_keys=True).encode()).hexdigest()[:12],
        "suite": one_line(record.spec.suite)[:_LONGEST_NAME],
        "cell": name_of(record)[:_LONGEST_NAME],
        "engine": one_line(record.spec.engine)[:_LONGEST_NAME],
        "workload": workload_of(record)[:_LONGEST_NAME],
        "fingerprint": record.fingerprint,
        "status": _DISTURBED if record.status == "ok" and record.disturbed else record.status,
        "tok_s": throughput(record) if record.status == "ok" else None,
        "record": json.dumps(to_json(record), allow_nan=False),
    }


def _lasting(machine: Mapping[str, str | float]) -> dict[str, str | float]:
    """What makes a machine the same one after an update: kernels have names, and keep different amounts of its RAM."""
    return {
        key: round(value / (1 << 30)) if isinstance(value, int | float) and key.endswith("_bytes") else value
        for key, value in machine.items()
        if key != "machine.os"
    }


def _series(rows: Sequence[dict[str, Any]]) -> Series:
    commits = grouped(rows, lambda row: row["commit"].rpartition("@")[2] + ("+" if row["dirty"] else ""))
    points = tuple(_point(commit, launches) for commit, launches in commits.items())
    named = {k: rows[-1][k] for k in ("suite", "cell", "engine", "workload", "fingerprint", "machine")}
    return Series(**named, points=points, subject=_subject(rows[-1]))


def _subject(row: Mapping[str, Any]) -> str:
    """The name before a commit; empty for the harness's own, which has none."""
    name, at, _ = str(row["commit"]).rpartition("@")
    return name if at else ""


def _point(commit: str, launches: Sequence[dict[str, Any]]) -> Point:
    def speeds(status: str) -> tuple[float, ...]:
        return tuple(v for r in launches if r["status"] == status and (v := finite(r["tok_s"])) and v > 0)

    disturbed = sum(r["status"] == _DISTURBED for r in launches)
    failed = sum(r["status"] not in ("ok", _DISTURBED) for r in launches)
    return Point(commit, launches[0]["started_at"], speeds("ok") or speeds(_DISTURBED), failed, disturbed)


@contextlib.contextmanager
def _one_line(address: sa.URL) -> Iterator[None]:
    """Turns errors of SQLAlchemy and its drivers into a HarnessError of one line, without secrets of the URL."""
    try:
        yield
    except ImportError as exc:
        package = exc.name or first_line(exc)
        raise HarnessError(f"the database of {shown(address)} needs the package {package}: {install(package)}") from exc
    except (SQLAlchemyError, OSError, ValueError, TypeError) as exc:
        why = without_secrets_of(address, first_line(getattr(exc, "orig", None) or exc))
        raise HarnessError(
            f"history {shown(address)}: {why}; --db takes a URL such as sqlite:///results/history.db"
        ) from exc
