"""Reads run directories (records.jsonl and the suite's description), and names the cells of records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from harness.api import HarnessError, RunRecord, RunSpec, parse_record, to_json
from reports.text import flat, one_line

#: The most of a log's end that a report shows.
_TAIL_BYTES, _TAIL_LINES = 8000, 30
RECORDS = "records.jsonl"
SUITE = "suite.yaml"


@dataclass(frozen=True)
class Runs:
    """The content of run directories: records in order of first appearance, and notes for the reader."""

    records: tuple[RunRecord, ...]
    descriptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reproduces: frozenset[str] = frozenset()  # published tables that the suites reproduce
    folders: Mapping[tuple[str, int], Path] = field(default_factory=dict)  # run directory by (fingerprint, repeat)
    retried: tuple[RunRecord, ...] = ()  # failed launches that a later record of the same repeat replaces

    @property
    def launches(self) -> tuple[RunRecord, ...]:
        """All launches, including failed ones that a retry replaced."""
        return (*self.records, *self.retried)

    def log_tail(self, record: RunRecord) -> str:
        """The last lines of a record's log; empty where the run directory no longer has it."""
        folder = self.folders.get((record.fingerprint, record.repeat))
        if folder is None or not record.log:
            return ""
        try:
            path = (folder / record.log).resolve()
            if not path.is_relative_to(folder.resolve()):  # a record is untrusted and may name any path
                return ""
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:])
        except (OSError, ValueError, RuntimeError):  # also for invalid names and circular links
            return ""


def load_records(dirs: Sequence[Path]) -> list[RunRecord]:
    """The records of run directories, one per (fingerprint, repeat): the last one wins. Raises as `read_runs`."""
    return list(read_runs(dirs).records)


def read_runs(dirs: Sequence[Path]) -> Runs:
    """Reads `records.jsonl` and, if present, `suite.yaml` of each directory.

    Skips a last line that a crash cut off, with a note. Raises HarnessError for a directory without records, a damaged
    line, and a schema newer than this program's.
    """
    if not dirs:
        raise HarnessError("no run directory given; name one that `harness run` wrote")
    notes: list[str] = []
    descriptions: list[str] = []
    latest: dict[tuple[str, int], RunRecord] = {}
    folders: dict[tuple[str, int], Path] = {}
    reproduces: set[str] = set()
    retried: list[RunRecord] = []
    total = disturbed = 0
    for folder in dirs:
        records = _read_folder(folder, notes)
        total += len(records)
        in_folder: dict[tuple[str, int], RunRecord] = {}
        for record in records:
            key = record.fingerprint, record.repeat
            if key in in_folder and in_folder[key].status not in ("ok", "interrupted"):
                retried.append(in_folder[key])
            disturbed += key in latest and latest[key].status == "ok" and latest[key].disturbed
            in_folder[key] = latest[key] = record
            folders[key] = folder
        suite = _suite(folder / SUITE, notes)
        description, table = suite.get("description"), suite.get("reproduces")
        if isinstance(description, str) and description and description not in descriptions:
            descriptions.append(description)
        reproduces |= {table} if isinstance(table, str) else set()
    if superseded := total - len(latest):
        why = f", {disturbed} because others disturbed the launch" if disturbed else ""
        notes.append(
            f"Skipped {superseded} of {total} records: a later record of the same cell and repeat replaces them{why}."
        )
    return Runs(
        tuple(latest.values()), tuple(descriptions), tuple(notes), frozenset(reproduces), folders, tuple(retried)
    )


def name_of(record: RunRecord) -> str:
    """The cell's name in the suite, or else its engine's name."""
    return one_line(record.spec.name) or one_line(record.spec.engine)


def workload_of(record: RunRecord) -> str:
    """The model and the workload as text; cells with the same text are comparable."""
    model = record.spec.model
    details = [f"revision {model.revision}"] if model.revision else []
    details += ["dummy weights"] if model.weights == "dummy" else []
    details += [f"stored as {model.dtype}"] if model.dtype != "auto" else []
    name = f"{model.id} ({', '.join(details)})" if details else model.id
    return one_line(f"{name}, {record.spec.workload.words}")


def settings_of(spec: RunSpec) -> dict[str, object]:
    """Settings by path, such as `policy.schedule`."""
    return flat(to_json(spec))


def _read_folder(folder: Path, notes: list[str]) -> list[RunRecord]:
    path = folder / RECORDS
    try:
        if path.exists() and not path.is_file():
            raise HarnessError(f"{path} is not a regular file; name a directory that `harness run` wrote")
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError as exc:
        raise HarnessError(f"{folder} has no {RECORDS}; name a directory that `harness run` wrote") from exc
    except OSError as exc:
        raise HarnessError(f"cannot read {path}: {exc.strerror or exc}") from exc
    if lines.pop().strip():  # a complete line ends in a newline, so text after the last one is from a crash
        notes.append(f"Skipped the last line of {path}: it is incomplete.")
    records = [parse_record(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise HarnessError(f"{path} holds no complete record; run the suite again to finish at least one cell")
    return records


def _suite(path: Path, notes: list[str]) -> Mapping[str, Any]:
    """The suite file as a mapping. The report needs only records, so a damaged suite file results in a note."""
    try:
        suite = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        notes.append(f"{path} cannot be read: the report lacks the suite's description.")
        return {}
    return suite if isinstance(suite, dict) else {}
